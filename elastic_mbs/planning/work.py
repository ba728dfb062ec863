"""The work in an operation, as what it multiplies and adds in products: by torch's table, with what that lacks of CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Of an operation on fakes; 0 for those that are no products."""
    formula = _FORMULAS.get(func._overloadpacket, lambda *args, **kwargs: 0)
    return formula(*args, **(kwargs or {}), out_val=out)


def _layer(args: Any) -> int:
    """Of an LSTM's layer: each step multiplies each sample with both matrices of weights."""
    data, *weights = args[:3]
    products: int = 2 * data.shape[0] * data.shape[1] * sum(each.numel() for each in weights)
    return products


_ATEN = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _ATEN._scaled_dot_product_flash_attention
    ],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
    _ATEN.mkldnn_rnn_layer: lambda *args, **kwargs: _layer(args),
    _ATEN.mkldnn_rnn_layer_backward: lambda *args, **kwargs: 2 * _layer(args),
}
