"""What a kernel keeps for its backward, where its fake does not tell: the kernel itself is asked, with a few short samples."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_LSTM = torch.ops.aten.mkldnn_rnn_layer.default  # oneDNN's, of one layer in one direction
_LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_MSE = torch.ops.aten.mse_loss.default
_NONE = 0  # no reduction
_SAMPLES = 64  # as many make whole pages of those parts of its workspace whose rows are aligned
# units times 64 samples: of other parts, too, rounding to pages is then less than a hundredth
_ROWS = 1024


def kept(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """What an operation on fakes has returned, with what the real one would keep besides."""
    if func is _MSE:
        # a number in the storage of what it is the mean of
        return out if args[2:] == (_NONE,) else (args[0] - args[1]).as_strided((), ())
    # both biases have one gradient; torch's cache of fakes makes two of it when it has seen the
    # shapes before
    if func is _LSTM_BACKWARD:
        return *out[:3], out[3], out[3], *out[5:]
    if func is not _LSTM or not args[15]:  # not while training: then there is no workspace
        return out
    *others, workspace = out
    steps, samples, inputs = args[0].shape  # whatever its flag says of the batch's place
    fixed, per_step = _lstm_workspace(
        args[0].dtype, inputs, hidden=args[10], mode=args[9], biases=args[12]
    )
    return *others, workspace.new_empty(round(samples * (fixed + per_step * steps)))


@cache
def _lstm_workspace(
    dtype: torch.dtype, inputs: int, *, hidden: int, mode: int, biases: bool
) -> tuple[float, float]:
    """Bytes per sample that a layer keeps, and those per sample and step, whatever the lengths: but for the rounding of its parts to pages."""
    samples = _SAMPLES * max(1, _ROWS // max(hidden, 16))
    zeros = partial(torch.zeros, dtype=dtype, device="cpu")

    def per_sample(steps: int) -> float:
        gates, state = 4 * hidden, zeros(samples, hidden)
        weights = zeros(gates, inputs), zeros(gates, hidden), *2 * [zeros(gates if biases else 0)]
        workspace: Tensor = _LSTM(
            zeros(steps, samples, inputs),
            *weights,
            state,
            state,
            False,
            [],
            mode,
            hidden,
            1,
            biases,
            False,
            False,
            True,
        )[3]
        return workspace.nbytes / samples

    with _disable_current_modes(), torch.enable_grad():
        two, three = per_sample(2), per_sample(3)
    return two - 2 * (three - two), three - two
