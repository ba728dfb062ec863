"""What wraps what: an out-of-memory error that others were raised from or beside is found, and a mistake that merely met one is not taken for it."""

import pytest
import torch
import torch._dynamo.exc

from elastic_mbs.errors import MicroBatchFloorError, NestedCallError, PoisonedDeviceError, ReplayUnsafeError
from elastic_mbs.memory.oom import Kind, Verdict, classify
from tests.helpers.oom_errors import CUDA_REPORT, TABLE_C, TABLE_D, Wrapper, caught, fail, judged, label, raised_from, raised_while_handling


@pytest.mark.parametrize("error", [Wrapper("step failed"), RuntimeError("step failed"), OSError(5, "step failed")])
def test_a_cause_and_an_error_in_place_of_the_one_being_handled_are_followed(error: Exception) -> None:
    assert judged(caught(raised_from, error, torch.OutOfMemoryError(CUDA_REPORT))) == judged(torch.OutOfMemoryError(CUDA_REPORT))
    assert judged(caught(raised_while_handling, error)).kind is Kind.ALLOCATOR


@pytest.mark.parametrize("error", [AssertionError(), TypeError(), ValueError(), KeyError(), NameError(), NotImplementedError(), UserWarning()])
def test_a_mistake_in_a_handler_passes_through_unless_it_names_its_cause(error: Exception) -> None:
    assert classify(caught(raised_while_handling, error)) is None
    assert (classify(caught(raised_from, error, torch.OutOfMemoryError())) is None) is isinstance(error, AssertionError)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_program_passes_through_whatever_it_interrupts(error: type[BaseException]) -> None:
    assert classify(caught(raised_while_handling, error())) is None
    assert classify(caught(raised_from, error(), torch.OutOfMemoryError()), lambda _: True) is None
    assert classify(caught(raised_from, Wrapper(), error())) is None


@pytest.mark.parametrize("text", TABLE_D[:7], ids=label)
def test_a_lost_device_passes_through_even_while_out_of_memory_is_handled(text: str) -> None:
    assert classify(caught(raised_while_handling, RuntimeError(text))) is None
    assert classify(caught(raised_from, Wrapper(text), torch.OutOfMemoryError())) is None


def test_from_none_is_respected() -> None:
    assert classify(caught(raised_from, Wrapper("step failed"), None)) is None


def test_an_error_that_was_handled_outside_the_guarded_code_is_not_followed() -> None:
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


def test_a_context_without_traceback_is_not_followed() -> None:
    error = RuntimeError("step failed")
    error.__context__ = torch.OutOfMemoryError()
    assert classify(error) is None


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
def test_a_poisoned_link_anywhere_decides(text: str) -> None:
    verdict = judged(caught(raised_from, torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(text)))
    assert verdict.kind is Kind.POISONED
    verdict = judged(caught(raised_while_handling, RuntimeError(text)))
    assert verdict.kind is Kind.POISONED


def test_a_certain_link_weighs_more_than_a_masked_one() -> None:
    masked = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    assert classify(caught(raised_from, masked, torch.OutOfMemoryError("CUDA out of memory."))) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")


def test_an_error_of_torch_compile_stands_for_its_inner_one() -> None:
    class BackendCompilerFailed(RuntimeError):
        inner_exception: object = torch.OutOfMemoryError("CUDA out of memory.")

    error = BackendCompilerFailed("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory.")
    assert classify(error) is None, "a user's class of that name is the user's"
    real = torch._dynamo.exc.BackendCompilerFailed("inductor", torch.OutOfMemoryError("CUDA out of memory."), None)
    assert classify(real) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")
    real.inner_exception = "a text"  # type: ignore[assignment]  # of tomorrow
    assert classify(real) is None


def test_a_group_is_out_of_memory_if_all_its_leaves_are() -> None:
    allocator, runtime = torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory")
    assert classify(ExceptionGroup("pieces", [allocator])) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")
    nested = ExceptionGroup("pieces", [allocator, ExceptionGroup("more", [runtime])])
    assert classify(nested) == Verdict(Kind.RUNTIME, "CUDA error: out of memory"), "the one that asks for more caution speaks"
    assert classify(ExceptionGroup("pieces", [allocator, ValueError("shape")])) is None
    assert classify(BaseExceptionGroup("pieces", [allocator, KeyboardInterrupt()])) is None
    assert classify(caught(raised_from, ExceptionGroup("pieces", [ValueError("shape")]), allocator)) is None
    wrapped = caught(raised_from, Wrapper("pieces failed"), ExceptionGroup("pieces", [allocator, allocator]))
    assert classify(wrapped) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")


def test_members_of_a_group_may_share_a_cause_or_point_back() -> None:
    cause = torch.OutOfMemoryError("CUDA out of memory.")
    members = [Wrapper("first"), Wrapper("second")]
    for member in members:
        member.__cause__ = cause
    assert classify(ExceptionGroup("pieces", members)) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")
    group = ExceptionGroup("pieces", [Wrapper("points back")])
    group.exceptions[0].__cause__ = group
    assert classify(group) is None


def test_our_own_errors_pass_through_but_the_floor_of_a_nested_runtime() -> None:
    verdict = classify(caught(raised_while_handling, MicroBatchFloorError("the smallest micro-batch does not fit")))
    assert verdict == Verdict(Kind.ALLOCATOR, "the smallest micro-batch does not fit")
    for error in (ReplayUnsafeError, PoisonedDeviceError, NestedCallError):
        assert classify(caught(raised_while_handling, error("no")), lambda _: True) is None
