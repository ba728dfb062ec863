"""The work of an operation: multiplications and additions in matmuls and convolutions.

The formulas are torch's, with CPU kernels added that its table lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of an operation on fakes; 0 unless it is a matmul or a convolution."""
    formula = _FORMULAS.get(func._overloadpacket, lambda *args, **kwargs: 0)
    return formula(*args, **(kwargs or {}), out_val=out)


_ATEN = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _ATEN._scaled_dot_product_flash_attention
    ],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}
