"""Which errors are out of memory, by the tables and by what the user adds to them."""

import errno

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.memory.oom import Kind, Verdict, classify
from elastic_mbs.memory.oom_patterns import requested_bytes
from tests.helpers.oom_errors import TABLE_A, TABLE_B, TABLE_C, TABLE_D, accelerator_error, judged, label


@pytest.mark.parametrize(("error", "kind", "requested"), TABLE_A, ids=label)
def test_out_of_memory_is_recognised_with_its_kind_and_request(error: Exception, kind: Kind, requested: int | None) -> None:
    verdict = judged(error)
    assert (verdict.kind, verdict.requested) == (kind, requested)


@pytest.mark.parametrize("text", TABLE_B, ids=label)
def test_a_masked_out_of_memory_is_marked_as_such(text: str) -> None:
    verdict = judged(RuntimeError(text))
    assert verdict.kind is Kind.MASKED
    assert not verdict.synchronous


@pytest.mark.parametrize("text", TABLE_C, ids=label)
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_poisoned_process_is_recognised_whatever_the_type(text: str, error: type[Exception]) -> None:
    verdict = judged(error(text))
    assert verdict.kind is Kind.POISONED
    assert not verdict.synchronous


@pytest.mark.parametrize("text", TABLE_D, ids=label)
@pytest.mark.parametrize("error", [RuntimeError, torch.AcceleratorError, OSError, type("OutOfResources", (Exception,), {})])
def test_what_only_looks_like_out_of_memory_passes_through(text: str, error: type[Exception]) -> None:
    assert classify(error(text)) is None


@pytest.mark.parametrize("code", [1, 700, 710, 719])
def test_an_error_code_weighs_more_than_a_text(code: int) -> None:
    assert classify(accelerator_error("CUDA error: out of memory", code)) is None


TEXTS = [str(error) for error, _, _ in TABLE_A if not isinstance(error, OSError)] + TABLE_B + TABLE_C


@pytest.mark.parametrize("text", [text for text in TEXTS if text], ids=label)
@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, Exception])
def test_a_text_counts_in_runtime_memory_and_os_errors_only(text: str, error: type[Exception]) -> None:
    assert classify(error(text)) is None


def test_an_os_error_counts_by_its_number_and_by_what_windows_adds() -> None:
    paging_file = OSError("The paging file is too small for this operation to complete")
    assert classify(paging_file) is None
    paging_file.winerror = 1455  # type: ignore[attr-defined, unused-ignore]  # known to mypy on Windows only
    verdict = judged(paging_file)
    assert verdict.kind is Kind.HOST
    assert classify(OSError(errno.ENOSPC, "No space left on device")) is None


@pytest.mark.parametrize("kind", Kind)
def test_only_a_refused_allocation_is_a_synchronous_failure(kind: Kind) -> None:
    assert Verdict(kind, "").synchronous is (kind in {Kind.ALLOCATOR, Kind.HOST, Kind.LIBRARY})


@given(text=st.text(max_size=80) | st.sampled_from(TEXTS), noise=st.text(alphabet="ab cd:\n", max_size=20))
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
    assert requested_bytes(f"Tried to allocate {number % 1000}.50 {scale}iB.") == (2 * (number % 1000) + 1) * 1024 ** ("KMGTPE".index(scale) + 1) // 2


def test_a_long_message_is_cut_and_one_that_is_empty_or_fails_is_the_type() -> None:
    class Unprintable(torch.OutOfMemoryError):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert classify(torch.OutOfMemoryError("x" * 1000)) == Verdict(Kind.ALLOCATOR, "x" * 300)
    assert classify(MemoryError()) == Verdict(Kind.HOST, "MemoryError")
    assert classify(Unprintable()) == Verdict(Kind.ALLOCATOR, "Unprintable")


def test_the_real_host_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    verdict = judged(caught.value)
    assert (verdict.kind, verdict.requested) == (Kind.HOST, 1 << 52)


# ---- the user's own predicate ----


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("over quota: tried to allocate 1.00 KiB"), Verdict(Kind.USER, "over quota: tried to allocate 1.00 KiB", requested=1024)),
        (ValueError("shape"), None),
        (torch.OutOfMemoryError("quota"), Verdict(Kind.ALLOCATOR, "quota")),
        (torch.OutOfMemoryError("x"), Verdict(Kind.ALLOCATOR, "x")),
        (RuntimeError("could not create a primitive: quota"), Verdict(Kind.USER, "could not create a primitive: quota")),
        (RuntimeError("CUDA driver error: device not ready, quota"), Verdict(Kind.POISONED, "CUDA driver error: device not ready, quota")),
    ],
    ids=label,
)
def test_the_user_can_add_errors_and_make_a_masked_one_certain_but_take_none_away(error: Exception, expected: Verdict | None) -> None:
    assert classify(error, lambda error: "quota" in str(error)) == expected


def test_an_error_in_the_users_predicate_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        classify(ValueError("shape"), lambda _: 1 // 0 == 0)
