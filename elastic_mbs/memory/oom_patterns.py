"""Texts of out-of-memory errors and of errors like them: regular expressions, table by table.

docs/internals/errors.md has the tables. A sentence ("CUDA out of memory. …") must open the text, so
that a user's "cache is out of memory slots" is none. A status code (`CUBLAS_STATUS_ALLOC_FAILED`)
must open it or follow a colon, a bracket or a parenthesis, as libraries print it. Spellings are
those of PyTorch itself (c10, ATen), of its extensions (torch_npu, IPEX), of the libraries that it
calls, and of the issue trackers. "CUDA out of memory" and its like come as a plain RuntimeError
from extensions that were built against old releases. Texts count for some types of error only:
those are in `oom.py`, `_kind`.
"""

from __future__ import annotations

import re
from typing import Final


def _any(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{alternative})" for alternative in alternatives))


# anything that may stand before a status code, in the first line
_CODE: Final = r"^(?:[^\n]*(?:: |\] |\())?"
_END: Final = r"(?=\.|\n| \(|$)"
_ENFORCE: Final = r"^(?:\[enforce fail at [^\]\n]*\][^\n]*?\W)?"  # c10's macro for the host

# Table A: shrink and replay.
ALLOCATOR: Final = _any(
    r"^(?:CUDA|HIP|XPU|NPU|MUSA|MLU) out of memory" + _END,
    r"^MPS backend out of memory \(MPS allocated",
    r"^Invalid buffer size: \d",
)
HOST: Final = _any(
    _ENFORCE
    + r"(?:DefaultCPUAllocator: (?:can't allocate|not enough) memory|posix_memalign failed)\b",
    r"^unable to mmap \d+ bytes from file [^\n]*: Cannot allocate memory \(12\)",
    r"^std::bad_alloc$",
)
LIBRARY: Final = _any(
    _CODE + r"(?:CUFFT|(?:CU|HIP|ROC)[A-Z]+_STATUS)_ALLOC_FAILED\b",
    _CODE + r"CUDNN_STATUS_INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED\b",
)
RUNTIME: Final = _any(
    r"^(?:CUDA|HIP)(?: driver)? error: out of memory" + _END,
    r"^cuda runtime error \(2\) : out of memory\b",
    r"^Triton Error \[(?:CUDA|HIP)\]: out of memory$",
    _CODE + r"(?:UR|ZE)_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b",
    r"^[^\n]*\bMODULE:PT_DEVMEM Allocation failed\b",
    _CODE + r"RESOURCE_EXHAUSTED: Out of memory\b",
)

# oneDNN's text for every failure. A failed primitive *descriptor* is an operation that it does not
# have.
ONEDNN: Final = _any(r"^could not (?:create|execute) a primitive\b(?! descriptor)")

# Table B: out of memory often enough for one shrink.
MASKED: Final = _any(
    # the last: no room for its handle, made at the first convolution
    _CODE + r"CUDNN_STATUS_(?:NOT_SUPPORTED|INTERNAL_ERROR|NOT_INITIALIZED)\b",
    r"^(?:\w+ was )?unable to find an engine to execute this computation\b",
    r"^Unable to find a valid cuDNN algorithm\b",
    _CODE
    + r"(?:CUBLAS_STATUS_NOT_INITIALIZED|CUSOLVER_STATUS_INTERNAL_ERROR|CUFFT_INTERNAL_ERROR)\b",
    ONEDNN.pattern,
    r"^NVML_SUCCESS == r INTERNAL ASSERT FAILED at [^\n]*CUDACachingAllocator",
    r"^[^\n]*\bmore than INT_MAX elements\b",
)

# Table C: the allocator, the device or the communicator cannot be trusted any more, or the request
# is a bug. NCCL tells the cause in a later line.
POISONED: Final = _any(
    r"^!handles_\.at\(i\) INTERNAL ASSERT FAILED\b",
    r"^CUDA driver error: device not ready\b",
    r"^NCCL (?:error|Error)\b[^\n]*\bunhandled cuda error\b",
    r"(?m:^(?:[^\n]*\bNCCL WARN )?\s*Cuda failure (?:\d+ )?'out of memory')",
    r"(?m:^(?:[^\n]*\bNCCL WARN )?\s*Failed to CUDA (?:host )?[cm]?alloc\b)",
    r"^\w+ out of memory\. Tried to allocate more than 1EB memory\b",
)

# Table D: not out of memory, whatever it was raised from.
OTHER: Final = _any(
    r"^(?:OutOfResources: )?out of resource: ",
    r"^(?:CUDA|HIP) error: (?:(?:an )?illegal memory access|unspecified launch "
    r"failure|device-side assert)\b",
    _CODE + r"CUBLAS_STATUS_EXECUTION_FAILED\b",
    r"^[^\n]*\bWatchdog caught collective operation timeout\b",
)

_SIZE: Final = r"(\d+(?:\.\d+)?)\s*(?:([KMGTPE])i?B\b|bytes?\b|B\b)"
REQUEST: Final = re.compile(
    r"(?:tried to allocate|trying to allocate|unable to allocate|invalid buffer size:)\s+" + _SIZE,
    re.IGNORECASE,
)
# CUDA's and HIP's: "this process has 78.08 GiB memory in use"; MemoryBudget's: "of which …"
HELD: Final = re.compile(rf"(?:this process has|of which) {_SIZE} (?:memory|is) in use\b")


def requested_bytes(text: str) -> int | None:
    """Return the size of the allocation that failed, in bytes, where the text has it.

    Both "GiB" and "GB" are powers of 1024 for PyTorch and Metal.
    """
    return _bytes(REQUEST.search(text))


def held_bytes(text: str) -> int | None:
    """Return the bytes that this process held when it failed, where the text has them."""
    return _bytes(HELD.search(text))


def _bytes(found: re.Match[str] | None) -> int | None:
    if found is None:
        return None
    number, prefix = found.groups()
    return (
        int(number.partition(".")[0])
        if prefix is None
        else round(float(number) * 1024 ** ("KMGTPE".index(prefix.upper()) + 1))
    )
