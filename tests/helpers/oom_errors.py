"""Errors of each table in docs/internals/errors.md, and errors that wrap others."""

import errno
from collections.abc import Callable
from typing import Any, cast

import torch

from elastic_mbs.memory.oom import Kind, Verdict, classify

GIB = 1 << 30
CUDA_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` "
    "to enable device-side assertions.\n"
)
CUDA_REPORT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.06 GiB is free. "
    "Including non-PyTorch memory, this process has 78.08 GiB memory in use. Of the allocated "
    "memory 76.28 GiB is allocated by PyTorch, "
    "and 1.30 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970"


def accelerator_error(text: str, code: int | None = None) -> RuntimeError:
    error: Any = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return cast(RuntimeError, error)


TABLE_A = [
    (torch.OutOfMemoryError(CUDA_REPORT), Kind.ALLOCATOR, 2 * GIB),
    (
        torch.OutOfMemoryError(
            "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 63.98 "
            "GiB"
        ),
        Kind.ALLOCATOR,
        20 << 20,
    ),
    (
        torch.OutOfMemoryError(
            "XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 "
            "GiB."
        ),
        Kind.ALLOCATOR,
        8 * GIB,
    ),
    (
        torch.OutOfMemoryError(
            "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback (most recent "
            "call last):"
        ),
        Kind.ALLOCATOR,
        None,
    ),
    (torch.OutOfMemoryError(), Kind.ALLOCATOR, None),
    (RuntimeError(CUDA_REPORT), Kind.ALLOCATOR, 2 * GIB),
    (RuntimeError("CUDA out of memory. Tried to allocate 512 bytes"), Kind.ALLOCATOR, 512),
    (
        RuntimeError(
            "HIP out of memory. Tried to allocate 1.50 KiB (GPU 0; 31.98 GiB total capacity)"
        ),
        Kind.ALLOCATOR,
        1536,
    ),
    (
        RuntimeError(
            "XPU out of memory. Tried to allocate 1.00 GiB (GPU 0; 15.56 GiB total capacity)"
        ),
        Kind.ALLOCATOR,
        GIB,
    ),
    (
        RuntimeError(
            "NPU out of memory. Tried to allocate 1.00 TiB (NPU 0; 60.96 GiB total capacity)"
        ),
        Kind.ALLOCATOR,
        1 << 40,
    ),
    (accelerator_error("CUDA error: out of memory" + CUDA_ADVICE), Kind.RUNTIME, None),
    (
        accelerator_error(
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the "
            "documentation.",
            2,
        ),
        Kind.RUNTIME,
        None,
    ),
    (accelerator_error("HIP error: out of memory" + CUDA_ADVICE, 2), Kind.RUNTIME, None),
    (accelerator_error("a spelling of tomorrow", 2), Kind.RUNTIME, None),
    (RuntimeError("CUDA error: out of memory" + CUDA_ADVICE), Kind.RUNTIME, None),
    (RuntimeError("CUDA driver error: out of memory"), Kind.RUNTIME, None),
    (
        RuntimeError(
            "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorRandom.cu:25"
        ),
        Kind.RUNTIME,
        None,
    ),
    (RuntimeError("Triton Error [CUDA]: out of memory"), Kind.RUNTIME, None),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        Kind.LIBRARY,
        None,
    ),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), Kind.LIBRARY, None),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Kind.LIBRARY, None),
    (
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        Kind.LIBRARY,
        None,
    ),
    (
        RuntimeError(
            "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"
        ),
        Kind.LIBRARY,
        None,
    ),
    (
        RuntimeError(
            "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"
        ),
        Kind.LIBRARY,
        None,
    ),
    (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), Kind.LIBRARY, None),
    (
        RuntimeError(
            "MPS backend out of memory (MPS allocated: 5.56 GB). Tried to allocate 768.00 MB"
        ),
        Kind.ALLOCATOR,
        768 << 20,
    ),
    (RuntimeError("Invalid buffer size: 9.75 GB"), Kind.ALLOCATOR, round(9.75 * GIB)),
    (
        RuntimeError(
            "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"
        ),
        Kind.RUNTIME,
        None,
    ),
    (
        RuntimeError(
            "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"
        ),
        Kind.RUNTIME,
        None,
    ),
    (RuntimeError("ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"), Kind.RUNTIME, None),
    (
        RuntimeError(
            "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB"
        ),
        Kind.RUNTIME,
        None,
    ),
    (
        RuntimeError(
            f"[enforce fail at alloc_cpu.cpp:127] err == 0. {CPU} {1 << 52} bytes. Error code 12"
        ),
        Kind.HOST,
        1 << 52,
    ),
    (
        RuntimeError(f"[enforce fail at CPUAllocator.cpp:68] . {CPU} 343597382720 bytes. "),
        Kind.HOST,
        343597382720,
    ),
    (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you "
            "tried to allocate 8 bytes."
        ),
        Kind.HOST,
        8,
    ),
    (RuntimeError(f"{CPU} 8 bytes."), Kind.HOST, 8),
    (
        RuntimeError("[enforce fail at CPUAllocator.cpp:56] posix_memalign failed: 12"),
        Kind.HOST,
        None,
    ),
    (RuntimeError("std::bad_alloc"), Kind.HOST, None),
    (
        RuntimeError(
            "unable to mmap 4096 bytes from file </torch_1_2>: Cannot allocate memory (12)"
        ),
        Kind.HOST,
        None,
    ),
    (MemoryError(), Kind.HOST, None),
    (
        MemoryError(
            "Unable to allocate 8.00 GiB for an array with shape (32768, 32768) and data type "
            "float64"
        ),
        Kind.HOST,
        8 * GIB,
    ),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), Kind.HOST, None),
    (
        RuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
        ),
        Kind.RUNTIME,
        16 * GIB,
    ),
    (
        RuntimeError(
            "Bad StatusOr access: RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."
        ),
        Kind.RUNTIME,
        None,
    ),
]

TABLE_B = [
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.",
    "CUDNN_BACKEND_OPERATION: cudnnFinalize Failed cudnn_status: CUDNN_STATUS_NOT_SUPPORTED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "unable to find an engine to execute this computation",
    "GET was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    "could not create a primitive",
    "could not execute a primitive",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, '
    "please report a bug to PyTorch. ",
    "nonzero is not supported for tensors with more than INT_MAX elements,   See "
    "https://github.com/pytorch/pytorch/issues/51871",
]

TABLE_C = [
    '!handles_.at(i) INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":487, please '
    "report a bug to PyTorch. ",
    "CUDA driver error: device not ready",
    f"{NCCL}, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
    "2.21.5\nncclUnhandledCudaError: Call failed.",
    "NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    f"{NCCL}, remote process exited, NCCL version 2.21.5\nLast error:\nCuda failure 'out of "
    "memory'",
    f"{NCCL}, internal error, NCCL version 2.21.5\nLast error:\nCuda failure 2 'out of memory'",
    "node1:100:200 [0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'",
    f"{NCCL}, internal error, NCCL version 2.27.3\nLast error:\nFailed to CUDA calloc async 608 "
    "bytes",
    "node1:100:200 [0] include/alloc.h:102 NCCL WARN Failed to CUDA host alloc 4096 bytes",
    "CUDA out of memory. Tried to allocate more than 1EB memory.",
]

TABLE_D = [
    "OutOfResources: out of resource: shared memory, Required: 245760, Hardware limit: 232448.",
    "out of resource: shared memory, Required: 245760, Hardware limit: 232448. Reducing block "
    "sizes or `num_stages` may help.",
    "CUDA error: an illegal memory access was encountered" + CUDA_ADVICE,
    "CUDA error: unspecified launch failure" + CUDA_ADVICE,
    "CUDA error: device-side assert triggered" + CUDA_ADVICE,
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, "
    "n, k)`",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) "
    "ran for 1800000 milliseconds before timing out.",
    "cache is out of memory slots",
    "out of memory",
    "the data service answered: CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA out of memory slots",
    "CUDA error: out of memory handles",
    "retrying after CUBLAS_STATUS_ALLOC_FAILED is disabled",
    "could not create a primitive descriptor for the matmul primitive. Run workload with "
    "environment variable ONEDNN_VERBOSE=all",
    "step failed, log follows\nCUDA out of memory. Tried to allocate 2.00 GiB",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
    "cpu!",
    "",
]


def label(value: object) -> str | None:
    return str(value)[:40] if isinstance(value, BaseException | str) else None


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
        raise error  # noqa: B904 - the missing link is the case


def caught(function: Callable[..., object], *args: object) -> BaseException:
    """Return the error of a call as the engine has it: caught in the frame that classifies it."""
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def judged(error: BaseException) -> Verdict:
    """Return the verdict on an error that is out of memory."""
    verdict = classify(error)
    assert verdict is not None
    return verdict
