"""A step of an optimizer beside a pool of last resort, `torch.cuda.MemPool(use_on_oom=True)`.

It runs in a process of its own, since such a pool can end its process.
"""

import gc
import json

import torch
from torch import nn

from elastic_mbs.memory import oom

DEVICE = torch.device("cuda", 0)


def tried(*, reserve: bool) -> dict[str, object]:
    """Try a step with too little memory for its state.

    Return whether it was made, and the bytes that stay reserved for nobody afterwards.
    """
    model = nn.Linear(4096, 4096, bias=False, device=DEVICE)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    torch.cuda.empty_cache()
    pool = torch.cuda.MemPool(use_on_oom=True) if reserve else None
    if pool is not None:
        with torch.cuda.use_mem_pool(pool, DEVICE):
            torch.empty(6 * model.weight.nbytes, dtype=torch.uint8, device=DEVICE)
    fraction = (torch.cuda.memory_reserved(DEVICE) + 2**20) / torch.cuda.get_device_properties(
        DEVICE
    ).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction, DEVICE)
    try:
        optimizer.step()
        made = True
    except torch.OutOfMemoryError as error:
        made = False
        oom.clear_traceback(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "reserve": reserve,
        "made": made,
        "stranded": torch.cuda.memory_reserved(DEVICE) - torch.cuda.memory_allocated(DEVICE),
    }


if __name__ == "__main__":
    for reserve in (False, True):
        print(json.dumps(tried(reserve=reserve)), flush=True)
