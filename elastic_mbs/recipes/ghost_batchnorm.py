"""BatchNorm over fixed groups of samples: neither gradient nor statistics depend on the split.

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
    """The part that the three have in common."""

    def __init__(self, num_features: int, group: int = 32, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.batch_group = _checked(group)  # read by the runtime, which takes it as `align`

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each group, and update the running statistics in the order of the groups.

        Where the running statistics are used (evaluation), it is BatchNorm.

        Raises:
            UsageError: One value per channel is left for the last group; it has no statistics.
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
        """Return the text of BatchNorm and the group."""
        return f"{super().extra_repr()}, group={self.batch_group}"  # type: ignore[no-untyped-call]


class GhostBatchNorm1d(_Grouped, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over groups of `group` samples; see `GhostBatchNorm2d`."""


class GhostBatchNorm2d(_Grouped, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over groups of `group` consecutive samples; the rest is a group as well.

    In evaluation it is BatchNorm, and each can load the other's state. `ElasticMBS` cuts batches at
    multiples of the group only, so gradients and running statistics are those of the whole batch.

    A model that gives it several rows per sample must give equally many for each. If a model calls
    it several times in a forward, its running statistics depend on the split. Samples that count
    nothing (`count=`) reach the statistics where something counts in their piece.

    Args:
        num_features: channels.
        group: samples of a group.
        **options: as for `nn.BatchNorm2d`.

    Raises:
        UsageError: The group is no whole number of at least 1.
    """


class GhostBatchNorm3d(_Grouped, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over groups of `group` samples; see `GhostBatchNorm2d`."""


_KINDS: dict[type[nn.Module], type[_Grouped]] = {
    **dict.fromkeys((nn.BatchNorm1d, GhostBatchNorm1d), GhostBatchNorm1d),
    **dict.fromkeys((nn.BatchNorm2d, GhostBatchNorm2d), GhostBatchNorm2d),
    **dict.fromkeys((nn.BatchNorm3d, GhostBatchNorm3d), GhostBatchNorm3d),
}


def convert_ghost_batchnorm(model: nn.Module, group: int = 32) -> nn.Module:
    """Replace each BatchNorm of a model by a ghost BatchNorm, in place.

    The ghost keeps parameters, statistics, mode and hooks. Convert before `ElasticMBS(model)`,
    which reads the group.

    Args:
        model: changed in place.
        group: samples of a group; ghosts that are there already get it as well.

    Returns:
        The model, or its ghost where the model is a BatchNorm itself.

    Raises:
        UsageError: A BatchNorm has no ghost (`nn.SyncBatchNorm`, a lazy one, a subclass of yours),
            or the group is below 1.
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
