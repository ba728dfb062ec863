"""Which errors are out of memory, and that nothing of a failed attempt stays alive. The tables are those of reference/errors.md."""

import errno
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs import oom
from elastic_mbs.errors import MicroBatchFloorError, NestedCallError, PoisonedDeviceError, ReplayUnsafeError
from elastic_mbs.oom import Kind, Verdict, classify, clear_frames, forget, probe, release
from elastic_mbs.oom_patterns import requested_bytes

GIB = 1 << 30
CUDA_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
CUDA_REPORT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.06 GiB is free. "
    "Including non-PyTorch memory, this process has 78.08 GiB memory in use. Of the allocated memory 76.28 GiB is allocated by PyTorch, "
    "and 1.30 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970"


def accelerator_error(text: str, code: int | None = None) -> RuntimeError:
    error: Any = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return cast(RuntimeError, error)


TABLE_A = [
    (torch.OutOfMemoryError(CUDA_REPORT), Kind.ALLOCATOR, 2 * GIB),
    (torch.cuda.OutOfMemoryError(CUDA_REPORT), Kind.ALLOCATOR, 2 * GIB),
    (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 63.98 GiB"), Kind.ALLOCATOR, 20 << 20),
    (torch.OutOfMemoryError("XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 GiB."), Kind.ALLOCATOR, 8 * GIB),
    (torch.OutOfMemoryError("Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback (most recent call last):"), Kind.ALLOCATOR, None),
    (torch.OutOfMemoryError(), Kind.ALLOCATOR, None),
    (RuntimeError(CUDA_REPORT), Kind.ALLOCATOR, 2 * GIB),
    (RuntimeError("CUDA out of memory. Tried to allocate 512 bytes"), Kind.ALLOCATOR, 512),
    (RuntimeError("HIP out of memory. Tried to allocate 1.50 KiB (GPU 0; 31.98 GiB total capacity)"), Kind.ALLOCATOR, 1536),
    (
        RuntimeError("XPU out of memory. Tried to allocate 1.00 GiB (GPU 0; 15.56 GiB total capacity; 990.00 MiB already allocated)"),
        Kind.ALLOCATOR,
        GIB,
    ),
    (RuntimeError("NPU out of memory. Tried to allocate 1.00 TiB (NPU 0; 60.96 GiB total capacity)"), Kind.ALLOCATOR, 1 << 40),
    (accelerator_error("CUDA error: out of memory" + CUDA_ADVICE), Kind.RUNTIME, None),
    (accelerator_error("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation.", 2), Kind.RUNTIME, None),
    (accelerator_error("HIP error: out of memory" + CUDA_ADVICE, 2), Kind.RUNTIME, None),
    (accelerator_error("a spelling of tomorrow", 2), Kind.RUNTIME, None),
    (RuntimeError("CUDA error: out of memory" + CUDA_ADVICE), Kind.RUNTIME, None),
    (RuntimeError("CUDA driver error: out of memory"), Kind.RUNTIME, None),
    (RuntimeError("cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorRandom.cu:25"), Kind.RUNTIME, None),
    (RuntimeError("Triton Error [CUDA]: out of memory"), Kind.RUNTIME, None),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), Kind.LIBRARY, None),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), Kind.LIBRARY, None),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Kind.LIBRARY, None),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), Kind.LIBRARY, None),
    (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"), Kind.LIBRARY, None),
    (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), Kind.LIBRARY, None),
    (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), Kind.LIBRARY, None),
    (
        RuntimeError(
            "MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: 6.80 GB). Tried to allocate 768.00 MB"
        ),
        Kind.ALLOCATOR,
        768 << 20,
    ),
    (RuntimeError("Invalid buffer size: 9.75 GB"), Kind.ALLOCATOR, round(9.75 * GIB)),
    (RuntimeError("Invalid buffer size: 19.38 GiB"), Kind.ALLOCATOR, round(19.38 * GIB)),
    (RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), Kind.RUNTIME, None),
    (RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), Kind.RUNTIME, None),
    (RuntimeError("ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"), Kind.RUNTIME, None),
    (RuntimeError("[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB"), Kind.RUNTIME, None),
    (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4503599627370496 bytes. "
            "Error code 12 (Cannot allocate memory)"
        ),
        Kind.HOST,
        4503599627370496,
    ),
    (
        RuntimeError(
            "[enforce fail at CPUAllocator.cpp:68] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 343597382720 bytes. "
        ),
        Kind.HOST,
        343597382720,
    ),
    (
        RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1024 bytes."),
        Kind.HOST,
        1024,
    ),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), Kind.HOST, 8),
    (RuntimeError("[enforce fail at CPUAllocator.cpp:56] posix_memalign failed: 12"), Kind.HOST, None),
    (RuntimeError("posix_memalign failed"), Kind.HOST, None),
    (RuntimeError("std::bad_alloc"), Kind.HEAP, None),
    (RuntimeError("unable to mmap 4096 bytes from file </torch_1_2>: Cannot allocate memory (12)"), Kind.HOST, None),
    (MemoryError(), Kind.HEAP, None),
    (MemoryError("Unable to allocate 8.00 GiB for an array with shape (32768, 32768) and data type float64"), Kind.HEAP, 8 * GIB),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), Kind.HOST, None),
    (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."), Kind.RUNTIME, 16 * GIB),
    (RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."), Kind.RUNTIME, None),
]

TABLE_B = [
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "CUDNN_BACKEND_OPERATION: cudnnFinalize Failed cudnn_status: CUDNN_STATUS_NOT_SUPPORTED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "unable to find an engine to execute this computation",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    "could not create a primitive",
    "could not execute a primitive",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, please report a bug to PyTorch. ',
    "nonzero is not supported for tensors with more than INT_MAX elements,   See https://github.com/pytorch/pytorch/issues/51871",
]

TABLE_C = [
    '!handles_.at(i) INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":487, please report a bug to PyTorch. ',
    "CUDA driver error: device not ready",
    f"{NCCL}, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call failed.",
    "NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    f"{NCCL}, remote process exited, NCCL version 2.21.5\nLast error:\nCuda failure 'out of memory'",
    f"{NCCL}, internal error, NCCL version 2.21.5\nLast error:\nCuda failure 2 'out of memory'",
    "node1:100:200 [0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'",
    f"{NCCL}, internal error, NCCL version 2.27.3\nLast error:\nFailed to CUDA calloc async 608 bytes",
    "Failed to CUDA calloc 10485760 bytes",
    "node1:100:200 [0] include/alloc.h:102 NCCL WARN Failed to CUDA host alloc 4096 bytes",
    "CUDA out of memory. Tried to allocate more than 1EB memory.",
]

TABLE_D = [
    "OutOfResources: out of resource: shared memory, Required: 245760, Hardware limit: 232448.",
    "out of resource: shared memory, Required: 245760, Hardware limit: 232448. Reducing block sizes or `num_stages` may help.",
    "CUDA error: an illegal memory access was encountered" + CUDA_ADVICE,
    "CUDA error: unspecified launch failure" + CUDA_ADVICE,
    "CUDA error: device-side assert triggered" + CUDA_ADVICE,
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 1800000 milliseconds before timing out.",
    "cache is out of memory slots",
    "out of memory",
    "the data service answered: CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA out of memory slots",
    "CUDA error: out of memory handles",
    "retrying after CUBLAS_STATUS_ALLOC_FAILED is disabled",
    "could not create a primitive descriptor for the matmul primitive. Run workload with environment variable ONEDNN_VERBOSE=all",
    "step failed, log follows\nCUDA out of memory. Tried to allocate 2.00 GiB",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "",
]


def label(value: object) -> str | None:
    return str(value)[:40] if isinstance(value, BaseException | str) else None


@pytest.mark.parametrize(("error", "kind", "requested"), TABLE_A, ids=label)
def test_out_of_memory_is_recognised_with_its_kind_and_request(error: Exception, kind: Kind, requested: int | None) -> None:
    verdict = classify(error)
    assert verdict is not None
    assert (verdict.kind, verdict.requested) == (kind, requested)


@pytest.mark.parametrize("text", TABLE_B, ids=label)
def test_a_masked_out_of_memory_is_marked_as_such(text: str) -> None:
    verdict = classify(RuntimeError(text))
    assert verdict is not None
    assert verdict.kind is Kind.MASKED
    assert not verdict.trustworthy


@pytest.mark.parametrize("text", TABLE_C, ids=label)
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_poisoned_process_is_recognised_whatever_the_type(text: str, error: type[Exception]) -> None:
    verdict = classify(error(text))
    assert verdict is not None
    assert verdict.kind is Kind.POISONED
    assert not verdict.trustworthy


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
    verdict = classify(paging_file)
    assert verdict is not None
    assert verdict.kind is Kind.HOST
    assert classify(OSError(errno.ENOSPC, "No space left on device")) is None


@pytest.mark.parametrize("kind", Kind)
def test_only_synchronous_allocation_failures_are_trustworthy(kind: Kind) -> None:
    assert Verdict(kind, "").trustworthy is (kind in {Kind.ALLOCATOR, Kind.HOST, Kind.HEAP, Kind.LIBRARY})


@given(text=st.text(max_size=80) | st.sampled_from(TEXTS), noise=st.text(alphabet="ab cd:\n", max_size=20))
def test_any_text_gives_a_verdict_or_none_with_one_short_line(text: str, noise: str) -> None:
    verdict = classify(RuntimeError(noise + text))
    if verdict is not None:
        assert 0 < len(verdict.message) <= 300
        assert len(verdict.message.splitlines()) == 1
    verdict = classify(torch.OutOfMemoryError(noise + text + noise))
    assert verdict is not None
    assert verdict.kind in {Kind.ALLOCATOR, Kind.POISONED}


@given(number=st.integers(0, 10**15), scale=st.sampled_from("KMGTPE"))
def test_the_request_is_read_in_powers_of_1024(number: int, scale: str) -> None:
    assert requested_bytes(f"Tried to allocate {number} bytes.") == number
    assert requested_bytes(f"Tried to allocate {number % 1000}.50 {scale}iB.") == (2 * (number % 1000) + 1) * 1024 ** ("KMGTPE".index(scale) + 1) // 2


def test_a_long_message_is_cut_and_an_empty_one_tells_the_type() -> None:
    assert oom.classify(torch.OutOfMemoryError("x" * 1000)) == Verdict(Kind.ALLOCATOR, "x" * 300)
    assert oom.classify(MemoryError()) == Verdict(Kind.HEAP, "MemoryError")


def test_an_error_that_cannot_be_printed_is_still_judged_by_its_type() -> None:
    class Unprintable(torch.OutOfMemoryError):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert classify(Unprintable()) == Verdict(Kind.ALLOCATOR, "Unprintable")


def test_the_real_host_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    verdict = classify(caught.value)
    assert verdict is not None
    assert (verdict.kind, verdict.requested) == (Kind.HOST, 1 << 52)


# ---- what wraps what ----


class Wrapper(Exception):
    pass


def fail(text: str = CUDA_REPORT, kind: type[Exception] = torch.OutOfMemoryError) -> None:
    raise kind(text)


def raised_from(error: BaseException, cause: BaseException | None) -> None:
    try:
        fail()
    except torch.OutOfMemoryError:
        raise error from cause


def raised_while_handling(error: BaseException, text: str = CUDA_REPORT) -> None:
    try:
        fail(text)
    except torch.OutOfMemoryError:
        raise error  # noqa: B904 - that it is not linked is the point


def caught(function: Callable[..., object], *args: object) -> BaseException:
    """As the engine does it: `classify` sees what its own frame has caught."""
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("error", [Wrapper("step failed"), RuntimeError("step failed"), TypeError("step failed"), OSError(5, "step failed")])
def test_an_explicit_cause_is_followed(error: Exception) -> None:
    verdict = classify(caught(raised_from, error, torch.OutOfMemoryError(CUDA_REPORT)))
    assert verdict is not None
    assert (verdict.kind, verdict.requested) == (Kind.ALLOCATOR, 2 * GIB)


@pytest.mark.parametrize("error", [Wrapper("step failed"), RuntimeError("step failed"), OSError(5, "step failed")])
def test_an_error_raised_in_place_of_the_one_being_handled_is_followed(error: Exception) -> None:
    verdict = classify(caught(raised_while_handling, error))
    assert verdict is not None
    assert verdict.kind is Kind.ALLOCATOR


@pytest.mark.parametrize("error", [AssertionError(), TypeError(), ValueError(), KeyError(), NameError(), NotImplementedError(), UserWarning()])
def test_a_mistake_in_a_handler_passes_through(error: Exception) -> None:
    assert classify(caught(raised_while_handling, error)) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_program_passes_through_whatever_it_interrupts(error: type[BaseException]) -> None:
    assert classify(caught(raised_while_handling, error())) is None
    assert classify(caught(raised_from, error(), torch.OutOfMemoryError()), lambda _: True) is None
    assert classify(caught(raised_from, Wrapper(), error())) is None


def test_an_assertion_passes_through_even_with_a_cause() -> None:
    assert classify(caught(raised_from, AssertionError("loss must be finite"), torch.OutOfMemoryError())) is None


@pytest.mark.parametrize("text", TABLE_D[:7], ids=label)
def test_a_lost_device_passes_through_even_while_out_of_memory_is_handled(text: str) -> None:
    assert classify(caught(raised_while_handling, RuntimeError(text))) is None
    assert classify(caught(raised_from, Wrapper(text), torch.OutOfMemoryError())) is None


def test_from_none_is_respected() -> None:
    assert classify(caught(raised_from, Wrapper("step failed"), None)) is None


def test_an_error_that_was_being_handled_before_the_guarded_code_began_is_not_followed() -> None:
    def guarded_call() -> BaseException:
        return caught(fail, "shapes do not match", RuntimeError)

    try:
        fail()
    except torch.OutOfMemoryError as earlier:
        error = guarded_call()
        assert error.__context__ is earlier
    assert classify(error) is None


def test_an_error_handled_in_the_frame_that_retries_is_not_followed() -> None:
    try:
        try:
            fail()
        except torch.OutOfMemoryError:
            fail("shapes do not match", RuntimeError)
    except RuntimeError as error:
        assert classify(error) is None


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
    verdict = classify(caught(raised_from, torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(text)))
    assert verdict is not None
    assert verdict.kind is Kind.POISONED
    verdict = classify(caught(raised_while_handling, RuntimeError(text)))
    assert verdict is not None
    assert verdict.kind is Kind.POISONED


def test_a_certain_link_weighs_more_than_a_masked_one() -> None:
    masked = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    assert classify(caught(raised_from, masked, torch.OutOfMemoryError("CUDA out of memory."))) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")


def test_an_error_of_torch_compile_stands_for_its_inner_one() -> None:
    class BackendCompilerFailed(RuntimeError):
        inner_exception: object = torch.OutOfMemoryError("CUDA out of memory.")

    error = BackendCompilerFailed("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory.")
    assert classify(error) is None, "a user's class of that name is the user's"
    BackendCompilerFailed.__module__ = "torch._dynamo.exc"
    assert classify(error) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")
    error.inner_exception = "a text"
    assert classify(error) is None


def test_the_real_error_of_torch_compile_carries_the_inner_one() -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    error = BackendCompilerFailed("inductor", torch.OutOfMemoryError("CUDA out of memory."), None)
    assert classify(error) == Verdict(Kind.ALLOCATOR, "CUDA out of memory.")


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


# ---- the user's own predicate ----


def test_the_user_can_add_errors_but_take_none_away() -> None:
    def says_yes(error: BaseException) -> bool:
        return "quota" in str(error)

    assert classify(ValueError("over quota: tried to allocate 1.00 KiB"), says_yes) == Verdict(
        Kind.USER, "over quota: tried to allocate 1.00 KiB", requested=1024
    )
    assert classify(ValueError("shape"), says_yes) is None
    assert classify(torch.OutOfMemoryError("quota"), says_yes) == Verdict(Kind.ALLOCATOR, "quota")
    assert classify(torch.OutOfMemoryError("x"), says_yes) == Verdict(Kind.ALLOCATOR, "x")


def test_the_user_turns_a_masked_error_into_a_certain_one_but_never_a_poisoned_one() -> None:
    masked = classify(RuntimeError("could not create a primitive"), lambda _: True)
    assert masked == Verdict(Kind.USER, "could not create a primitive")
    poisoned = classify(RuntimeError("CUDA driver error: device not ready"), lambda _: True)
    assert poisoned is not None
    assert poisoned.kind is Kind.POISONED


def test_an_error_in_the_users_predicate_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        classify(ValueError("shape"), lambda _: 1 // 0 == 0)


# ---- letting go ----


def attempt(watch: list[weakref.ref[torch.Tensor]], wrap: bool) -> None:
    activations = torch.zeros(1000)
    watch.append(weakref.ref(activations))
    try:
        fail()
    except torch.OutOfMemoryError:
        if wrap:
            raise Wrapper("step failed")  # noqa: B904 - that it is not linked is the point
        raise


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.usefixtures("no_collector")
def test_a_verdict_keeps_nothing_of_the_failed_attempt_alive(wrap: bool) -> None:
    watch: list[weakref.ref[torch.Tensor]] = []
    verdict = None
    try:
        attempt(watch, wrap)
    except Exception as error:
        verdict = classify(error)
        assert watch[0]() is not None
    assert verdict is not None
    assert watch[0]() is None, "by reference counts alone"


@pytest.mark.usefixtures("no_collector")
def test_forgetting_frees_what_a_cycle_through_a_handlers_variable_would_keep() -> None:
    def wrapping() -> None:
        activations = torch.zeros(1000)
        watch.append(weakref.ref(activations))
        try:
            fail()
        except torch.OutOfMemoryError as inner:
            kept = inner  # this frame → kept → its traceback → this frame
            raise Wrapper("step failed") from kept

    def run(forgetting: bool) -> None:
        try:
            wrapping()
        except Wrapper as error:
            if forgetting:
                forget(error)

    watch: list[weakref.ref[torch.Tensor]] = []
    run(forgetting=False)
    assert watch[0]() is not None
    run(forgetting=True)
    assert watch[1]() is None


@pytest.mark.usefixtures("no_collector")
def test_forgetting_an_exception_frees_its_tensors_although_it_is_kept() -> None:
    watch: list[weakref.ref[torch.Tensor]] = []
    direct, context = caught(attempt, watch, False), caught(attempt, watch, True)
    wrapped = Wrapper("step failed")
    wrapped.__cause__, wrapped.__context__ = ExceptionGroup("pieces", [context, wrapped]) if isinstance(context, Exception) else None, direct
    direct.__cause__ = wrapped
    forget(wrapped)
    assert [ref() for ref in watch] == [None, None]


@pytest.mark.usefixtures("no_collector")
def test_clearing_frames_leaves_the_running_ones_alone() -> None:
    watch: list[weakref.ref[torch.Tensor]] = []
    mine = torch.zeros(3)
    error = caught(attempt, watch, False)
    clear_frames(error.__traceback__)
    clear_frames(None)
    assert watch[0]() is None
    assert mine.numel() == 3


class Backend:
    """Stands for torch.cuda and its like."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls = 0
        self.error = error

    def empty_cache(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


def backends(monkeypatch: pytest.MonkeyPatch, **modules: object) -> None:
    monkeypatch.setattr(torch, "get_device_module", modules.__getitem__)


DEVICES = [torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu"), torch.device("xpu")]


def test_a_first_failure_costs_neither_a_collection_nor_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Backend()
    backends(monkeypatch, cuda=cuda, cpu=SimpleNamespace(), xpu=cuda)
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected"))
    release(devices=DEVICES, thorough=False)
    assert cuda.calls == 0


def test_a_thorough_release_collects_then_empties_each_backend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, xpu = Backend(), Backend()
    backends(monkeypatch, cuda=cuda, cpu=SimpleNamespace(), xpu=xpu)
    watch: list[weakref.ref[torch.Tensor]] = []
    cycle: list[Any] = [torch.zeros(10)]
    watch.append(weakref.ref(cycle[0]))
    cycle.append(cycle)
    del cycle
    release(devices=iter(DEVICES), thorough=True)
    assert watch[0]() is None
    assert (cuda.calls, xpu.calls) == (1, 1)


def test_a_release_that_itself_fails_is_logged_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    xpu = Backend()
    backends(monkeypatch, cuda=Backend(RuntimeError("CUDA error: out of memory" + CUDA_ADVICE)), cpu=SimpleNamespace(), xpu=xpu)
    with caplog.at_level(logging.DEBUG, logger="elastic_mbs"):
        release(devices=[*DEVICES, torch.device("meta")], thorough=True)
    assert xpu.calls == 1
    assert "empty_cache on cuda: CUDA error: out of memory" in caplog.messages


def pin(monkeypatch: pytest.MonkeyPatch, error: BaseException, traceback: TracebackType | None) -> None:
    for name, value in (("last_exc", error), ("last_value", error), ("last_traceback", traceback)):
        monkeypatch.setattr(sys, name, value, raising=False)


def test_an_out_of_memory_pinned_by_a_shell_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    watch: list[weakref.ref[torch.Tensor]] = []
    error = caught(attempt, watch, False)
    pin(monkeypatch, error, error.__traceback__)
    release(devices=[], thorough=False)
    assert watch[0]() is not None
    release(devices=[], thorough=True)
    assert watch[0]() is None


def test_another_error_pinned_by_a_shell_is_left_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistake() -> None:
        evidence = torch.zeros(3)
        watch.append(weakref.ref(evidence))
        fail("shape", ValueError)

    watch: list[weakref.ref[torch.Tensor]] = []
    error = caught(mistake)
    pin(monkeypatch, error, error.__traceback__)
    release(devices=[], thorough=True)
    assert watch[0]() is not None


# ---- probing ----


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None], None),
        ([RuntimeError("CUDA error: out of memory"), None], None),
        ([torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")], None),
        ([RuntimeError("CUDA error: out of memory" + CUDA_ADVICE)] * 2, "CUDA error: out of memory"),
        (
            [RuntimeError("CUDA error: an illegal memory access was encountered" + CUDA_ADVICE)],
            "CUDA error: an illegal memory access was encountered",
        ),
        ([RuntimeError("CUDA driver error: device not ready")], "CUDA driver error: device not ready"),
        ([RuntimeError("")], "RuntimeError"),
    ],
    ids=["healthy", "one left over", "merely full", "keeps failing", "sticky", "poisoned", "silent"],
)
def test_a_probe_tells_a_poisoned_device_from_a_healthy_one(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None], expected: str | None
) -> None:
    pending = list(errors)

    def exercise(device: torch.device) -> None:
        assert device.type == "cuda"
        error = pending.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(oom, "_exercise", exercise)
    assert probe(torch.device("cuda:0")) == expected
    assert pending == []


def test_the_cpu_is_always_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "_exercise", lambda device: pytest.fail("exercised"))
    assert probe(torch.device("cpu")) is None


# ---- on a GPU ----


@pytest.mark.gpu
def test_a_real_device_out_of_memory_is_recognised_and_leaves_a_healthy_device() -> None:
    device = torch.device("cuda")
    size = 4 * torch.cuda.get_device_properties(device).total_memory
    with pytest.raises(torch.OutOfMemoryError) as info:
        torch.empty(size, dtype=torch.uint8, device=device)
    verdict = classify(info.value)
    assert verdict is not None
    assert verdict.kind is Kind.ALLOCATOR
    assert verdict.requested == pytest.approx(size, rel=0.01)
    assert probe(device) is None


@pytest.mark.gpu
def test_a_thorough_release_gives_the_cache_back_to_the_device() -> None:
    device = torch.device("cuda")
    kept = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    del kept
    reserved = torch.cuda.memory_reserved(device)
    release(devices=[device], thorough=False)
    assert torch.cuda.memory_reserved(device) == reserved
    release(devices=[device], thorough=True)
    assert torch.cuda.memory_reserved(device) <= reserved - (1 << 28)
