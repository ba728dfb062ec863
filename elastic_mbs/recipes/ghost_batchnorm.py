"""BatchNorm over fixed groups of samples, so that how a batch is split changes neither its gradient nor its running statistics.

The size of the group is part of the loss that is trained, as the batch of one worker is in Goyal et
al. (arXiv 1706.02677, section 2.3); the name is from Hoffer et al. (arXiv 1705.08741).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from elastic_mbs.errors import UsageError
from elastic_mbs.rollback.graph import mark_grouped


class _Grouped(_BatchNorm):
    """What the three have in common."""

    def __init__(self, num_features: int, group: int = 32, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.batch_group = _checked(group)  # read by the runtime, which takes it as `align`

    def forward(self, input: Tensor) -> Tensor:
        """Normalises each group, and adds its statistics to the running ones, in the order of the groups; BatchNorm where those are used.

        Raises:
            UsageError: one value per channel is left for the last group, which has no statistics
                then.
        """
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if len(input) % self.batch_group == 1 and input[0, 0].numel() == 1:
            raise UsageError(
                f"{len(input)} rows leave one for the last group of {self.batch_group}, and one "
                "value has no statistics: "
                f"use batches of a multiple of {self.batch_group} (drop_last=True)"
            )
        norm = super().forward
        return torch.cat([mark_grouped(norm(rows)) for rows in input.split(self.batch_group)])

    def extra_repr(self) -> str:
        """BatchNorm's, and the group."""
        return f"{super().extra_repr()}, group={self.batch_group}"  # type: ignore[no-untyped-call]


class GhostBatchNorm1d(_Grouped, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over groups of `group` samples; see `GhostBatchNorm2d`."""


class GhostBatchNorm2d(_Grouped, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over groups of `group` samples: the first so many of the batch, and so on; what is left over at its end is a group as well.

    In evaluation it is BatchNorm, and their states are each other's. `ElasticMBS` reads the group
    and cuts batches at its multiples only, so that gradients and running statistics are those of
    the whole batch. A model that gives it several rows per sample must give the same number for
    each. One that calls it several times in a forward gets running statistics that depend on the
    split, and samples that count nothing (`count=`) reach them where something counts in their
    piece.

    Args:
        num_features: channels.
        group: samples of a group.
        **options: as for `nn.BatchNorm2d`.

    Raises:
        UsageError: the group is no whole number of at least 1.
    """


class GhostBatchNorm3d(_Grouped, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over groups of `group` samples; see `GhostBatchNorm2d`."""


_KINDS: dict[type[nn.Module], type[_Grouped]] = {
    **dict.fromkeys((nn.BatchNorm1d, GhostBatchNorm1d), GhostBatchNorm1d),
    **dict.fromkeys((nn.BatchNorm2d, GhostBatchNorm2d), GhostBatchNorm2d),
    **dict.fromkeys((nn.BatchNorm3d, GhostBatchNorm3d), GhostBatchNorm3d),
}


def convert_ghost_batchnorm(model: nn.Module, group: int = 32) -> nn.Module:
    """Puts a ghost BatchNorm in the place of each BatchNorm of a model, with its parameters, statistics, mode and hooks.

    Do it before the model's `ElasticMBS` is made, which reads the group then.

    Args:
        model: changed in place.
        group: samples of a group; ghosts that are there already get it as well.

    Returns:
        The model, or what stands for it where it is a BatchNorm itself.

    Raises:
        UsageError: a kind of BatchNorm that has no ghost (`nn.SyncBatchNorm`, a lazy one, one of
            the user's), or a group below 1.
    """
    _checked(group)
    ghosts: dict[nn.Module, nn.Module] = {}
    for where, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            ghosts[module] = _ghost(module, where, group)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in ghosts:
                parent._modules[name] = ghosts[child]
    return ghosts.get(model, model)


def _ghost(module: nn.Module, name: str, group: int) -> nn.Module:
    if type(module) not in _KINDS:
        raise UsageError(
            f"{name or 'the model'} is a {type(module).__name__}, which has no ghost: put "
            "nn.BatchNorm1d, 2d or 3d in its place first"
        )
    kind = _KINDS[type(module)]
    ghost = kind.__new__(kind)
    # tensors and hooks are shared, not copied: an optimizer may hold them
    ghost.__dict__ = vars(module) | {"batch_group": group}
    return ghost


def _checked(group: int) -> int:
    if type(group) is not int or group < 1:
        raise UsageError(
            f"group={group!r} is no whole number of samples of at least 1: Goyal et al. use 32"
        )
    return group
