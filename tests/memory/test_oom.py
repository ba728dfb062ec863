"""Out-of-memory errors by the tables, by the user's predicate, and inside other errors."""

import errno

import pytest
import torch
import torch._dynamo.exc
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.errors import (
    MicroBatchFloorError,
    NestedCallError,
    PoisonedDeviceError,
    ReplayUnsafeError,
)
from elastic_mbs.memory.oom import Kind, Verdict, classify
from elastic_mbs.memory.oom_patterns import requested_bytes
from tests.helpers.oom_errors import (
    TABLE_A,
    TABLE_B,
    TABLE_C,
    TABLE_D,
    Wrapper,
    caught,
    fail,
    judged,
    label,
    raised_from,
    raised_while_handling,
)


@pytest.mark.parametrize(("error", "kind", "requested"), TABLE_A, ids=label)
def test_out_of_memory_is_recognised_with_its_kind_and_request(
    error: Exception, kind: Kind, requested: int | None
) -> None:
    verdict = judged(error)
    assert (verdict.kind, verdict.requested) == (kind, requested)


@pytest.mark.parametrize("text", TABLE_B, ids=label)
def test_a_masked_out_of_memory_is_marked_as_such(text: str) -> None:
    verdict = judged(RuntimeError(text))
    assert (verdict.kind, verdict.synchronous) == (Kind.MASKED, False)


@pytest.mark.parametrize("text", TABLE_C, ids=label)
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_poisoned_process_is_recognised_whatever_the_type(
    text: str, error: type[Exception]
) -> None:
    verdict = judged(error(text))
    assert (verdict.kind, verdict.synchronous) == (Kind.POISONED, False)


@pytest.mark.parametrize("text", TABLE_D, ids=label)
@pytest.mark.parametrize(
    "error",
    [RuntimeError, torch.AcceleratorError, OSError, type("OutOfResources", (Exception,), {})],
)
def test_what_only_looks_like_out_of_memory_passes_through(
    text: str, error: type[Exception]
) -> None:
    assert classify(error(text)) is None


@pytest.mark.parametrize("code", [1, 700, 710, 719])
def test_an_error_code_weighs_more_than_a_text(code: int) -> None:
    error = torch.AcceleratorError("CUDA error: out of memory")
    error.error_code = code  # type: ignore[attr-defined]  # as torch sets it
    assert classify(error) is None


TEXTS = (
    [str(error) for error, _, _ in TABLE_A if not isinstance(error, OSError)] + TABLE_B + TABLE_C
)


@pytest.mark.parametrize("text", [text for text in TEXTS if text], ids=label)
@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, Exception])
def test_a_text_counts_in_runtime_memory_and_os_errors_only(
    text: str, error: type[Exception]
) -> None:
    assert classify(error(text)) is None


def test_an_os_error_counts_by_its_number_and_by_what_windows_adds() -> None:
    paging_file = OSError("The paging file is too small for this operation to complete")
    assert classify(paging_file) is None
    paging_file.winerror = 1455  # type: ignore[attr-defined, unused-ignore]  # known to mypy on Windows only
    assert judged(paging_file).kind is Kind.HOST
    assert classify(OSError(errno.ENOSPC, "No space left on device")) is None


@pytest.mark.parametrize("kind", Kind)
def test_only_a_refused_allocation_is_a_synchronous_failure(kind: Kind) -> None:
    assert Verdict(kind, "").synchronous is (kind in {Kind.ALLOCATOR, Kind.HOST, Kind.LIBRARY})


@given(
    text=st.text(max_size=80) | st.sampled_from(TEXTS),
    noise=st.text(alphabet="ab cd:\n", max_size=20),
)
def test_any_text_gives_a_verdict_or_none_with_one_short_line(text: str, noise: str) -> None:
    verdict = classify(RuntimeError(noise + text))
    if verdict is not None:
        assert 0 < len(verdict.message) <= 300
        assert len(verdict.message.splitlines()) == 1
    verdict = judged(torch.OutOfMemoryError(noise + text + noise))
    assert verdict.kind in {Kind.ALLOCATOR, Kind.POISONED}


@given(number=st.integers(0, 10**15), scale=st.sampled_from("KMGTPE"))
def test_the_request_is_read_in_powers_of_1024(number: int, scale: str) -> None:
    assert requested_bytes(f"Tried to allocate {number} bytes.") == number
    assert (
        requested_bytes(f"Tried to allocate {number % 1000}.50 {scale}iB.")
        == (2 * (number % 1000) + 1) * 1024 ** ("KMGTPE".index(scale) + 1) // 2
    )


def test_a_long_message_is_cut_and_one_that_is_empty_or_fails_is_the_type() -> None:
    class Unprintable(torch.OutOfMemoryError):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert classify(torch.OutOfMemoryError("x" * 1000)) == Verdict(Kind.ALLOCATOR, "x" * 300)
    assert classify(MemoryError()) == Verdict(Kind.HOST, "MemoryError")
    assert classify(Unprintable()) == Verdict(Kind.ALLOCATOR, "Unprintable")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ValueError("over quota: tried to allocate 1.00 KiB"),
            Verdict(Kind.USER, "over quota: tried to allocate 1.00 KiB", requested=1024),
        ),
        (ValueError("shape"), None),
        (torch.OutOfMemoryError("quota"), Verdict(Kind.ALLOCATOR, "quota")),
        (torch.OutOfMemoryError("x"), Verdict(Kind.ALLOCATOR, "x")),
        (
            RuntimeError("could not create a primitive: quota"),
            Verdict(Kind.USER, "could not create a primitive: quota"),
        ),
        (
            RuntimeError("CUDA driver error: device not ready, quota"),
            Verdict(Kind.POISONED, "CUDA driver error: device not ready, quota"),
        ),
    ],
    ids=label,
)
def test_the_user_can_add_errors_and_take_none_away(
    error: Exception, expected: Verdict | None
) -> None:
    assert classify(error, lambda error: "quota" in str(error)) == expected


@pytest.mark.parametrize(
    "error", [Wrapper("step failed"), RuntimeError("step failed"), OSError(5, "step failed")]
)
def test_a_cause_and_an_error_in_place_of_the_one_being_handled_are_followed(
    error: Exception,
) -> None:
    oom = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert judged(caught(raised_from, error, oom)) == judged(oom)
    assert judged(caught(raised_while_handling, error)).kind is Kind.ALLOCATOR


@pytest.mark.parametrize(
    "error",
    [
        AssertionError(),
        TypeError(),
        ValueError(),
        KeyError(),
        NameError(),
        NotImplementedError(),
        UserWarning(),
    ],
)
def test_a_mistake_in_a_handler_passes_through_unless_it_names_its_cause(error: Exception) -> None:
    assert classify(caught(raised_while_handling, error)) is None
    assert (classify(caught(raised_from, error, torch.OutOfMemoryError())) is None) is isinstance(
        error, AssertionError
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_program_passes_through_whatever_it_interrupts(
    error: type[BaseException],
) -> None:
    assert classify(caught(raised_while_handling, error())) is None
    assert classify(caught(raised_from, error(), torch.OutOfMemoryError()), lambda _: True) is None
    assert classify(caught(raised_from, Wrapper(), error())) is None


@pytest.mark.parametrize("text", TABLE_D[:7], ids=label)
def test_a_lost_device_passes_through_even_while_out_of_memory_is_handled(text: str) -> None:
    assert classify(caught(raised_while_handling, RuntimeError(text))) is None
    assert classify(caught(raised_from, Wrapper(text), torch.OutOfMemoryError())) is None


def test_errors_handled_outside_the_guarded_code_are_not_followed() -> None:
    assert classify(caught(raised_from, Wrapper("step failed"), None)) is None
    without_traceback = RuntimeError("step failed")
    without_traceback.__context__ = torch.OutOfMemoryError()
    assert classify(without_traceback) is None
    try:
        fail()
    except torch.OutOfMemoryError as earlier:
        error = caught(fail, "shapes do not match", RuntimeError)
        assert error.__context__ is earlier
    assert classify(error) is None
    try:
        try:
            fail()
        except torch.OutOfMemoryError:
            fail("shapes do not match", RuntimeError)
    except RuntimeError as in_the_frame_that_retries:
        assert classify(in_the_frame_that_retries) is None


def test_a_long_chain_is_followed_and_a_cycle_ends() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert classify(first) is None
    chain: Exception = torch.OutOfMemoryError("CUDA out of memory.")
    for depth in range(20):
        outer = Wrapper(f"at depth {depth}")
        outer.__cause__ = chain
        chain = outer
    assert classify(chain) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")
    for _ in range(20):
        outer = Wrapper("and more")
        outer.__cause__ = chain
        chain = outer
    assert classify(chain) is None, "the walk is bounded"


@pytest.mark.parametrize("text", TABLE_C, ids=label)
def test_a_poisoned_link_decides_and_a_certain_one_beats_a_masked(
    text: str,
) -> None:
    assert (
        judged(
            caught(raised_from, torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(text))
        ).kind
        is Kind.POISONED
    )
    assert judged(caught(raised_while_handling, RuntimeError(text))).kind is Kind.POISONED
    masked = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    assert classify(
        caught(raised_from, masked, torch.OutOfMemoryError("CUDA out of memory."))
    ) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")


def test_an_error_of_torch_compile_stands_for_its_inner_one() -> None:
    class BackendCompilerFailed(RuntimeError):
        inner_exception: object = torch.OutOfMemoryError("CUDA out of memory.")

    error = BackendCompilerFailed(
        "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory."
    )
    assert classify(error) is None, "a user's class of that name is the user's"
    real = torch._dynamo.exc.BackendCompilerFailed(
        "inductor", torch.OutOfMemoryError("CUDA out of memory."), None
    )
    assert classify(real) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")
    real.inner_exception = "a text"  # type: ignore[assignment]  # of tomorrow
    assert classify(real) is None


def test_a_group_is_out_of_memory_if_all_its_leaves_are() -> None:
    allocator, runtime = (
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: out of memory"),
    )
    assert classify(ExceptionGroup("pieces", [allocator])) == Verdict(
        Kind.ALLOCATOR, "CUDA out of memory."
    )
    nested = ExceptionGroup("pieces", [allocator, ExceptionGroup("more", [runtime])])
    assert classify(nested) == Verdict(Kind.RUNTIME, "CUDA error: out of memory"), (
        "the one that asks for more caution speaks"
    )
    assert classify(ExceptionGroup("pieces", [allocator, ValueError("shape")])) is None
    assert classify(BaseExceptionGroup("pieces", [allocator, KeyboardInterrupt()])) is None
    assert (
        classify(caught(raised_from, ExceptionGroup("pieces", [ValueError("shape")]), allocator))
        is None
    )
    wrapped = caught(
        raised_from, Wrapper("pieces failed"), ExceptionGroup("pieces", [allocator, allocator])
    )
    assert classify(wrapped) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")
    members = [Wrapper("first"), Wrapper("second")]  # which share a cause, and one that points back
    for member in members:
        member.__cause__ = allocator
    assert classify(ExceptionGroup("pieces", members)) == Verdict(
        Kind.ALLOCATOR, "CUDA out of memory."
    )
    group = ExceptionGroup("pieces", [Wrapper("points back")])
    group.exceptions[0].__cause__ = group
    assert classify(group) is None


def test_our_own_errors_pass_through_but_the_floor_of_a_nested_runtime() -> None:
    verdict = classify(
        caught(raised_while_handling, MicroBatchFloorError("the smallest micro-batch does not fit"))
    )
    assert verdict == Verdict(Kind.ALLOCATOR, "the smallest micro-batch does not fit")
    for error in (ReplayUnsafeError, PoisonedDeviceError, NestedCallError):
        assert classify(caught(raised_while_handling, error("no")), lambda _: True) is None
