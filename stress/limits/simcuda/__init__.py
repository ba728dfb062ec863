"""A simulated CUDA runtime, driver and NVML under a CUDA build of torch, without a card.

Real are torch's `CUDACachingAllocator` (its errors, cache, retries, fragmentation, memory
fraction, statistics, expandable segments), torch's streams and events, co-tenants, which are
processes of their own, and every number: an operation runs the CPU's kernel on the memory of the
CUDA tensors.

Simulated is device memory, which is host memory. A file that all processes share (`SIMCUDA_FILE`)
has each one's share of each device, and the driver and NVML answer from it. An operation is done at
once; the device's time for it (`SIMCUDA_LAG_US`) moves only the moment at which streams and events
are ready. Copies to and from pinned memory arrive when the order of streams and events demands it,
and not before.

Missing are speed, the device's own kernels (an operation that has none for the CPU is an error,
which names the kernel; `SIMCUDA_LENIENT=1` lets it pass without computing anything), cuDNN and the
fused attentions, CUDA graphs, memory shared between processes, NCCL.

Everything has to be in place when a process starts: `environment()` has the variables.
`stress --kind simcuda`, `pytest --simcuda` and `tools/gpu_check --simcuda` start themselves again
under them; `control.Simulation` makes faults happen in such a process.

    variable          meaning                                                         default
    SIMCUDA_DEVICES   devices, at most 4                                              1
    SIMCUDA_TOTAL     bytes of each                                                   8 GiB
    SIMCUDA_CONTEXT   bytes that a process's context takes                            256 MiB
    SIMCUDA_CUBLAS    bytes of cuBLAS's workspace in each stream                      32 MiB
    SIMCUDA_LAG_US    microseconds of device time of each operation                   0
    SIMCUDA_FILE      the file of processes that share a device                       one a run

The first four are asked when the first process comes, and stand until the last one has ended.
"""

from .build import environment, inside, start_again, trouble, trouble_here
from .control import Simulation

__all__ = ["Simulation", "environment", "inside", "start_again", "trouble", "trouble_here"]
