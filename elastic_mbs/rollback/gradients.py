"""The ledger of gradients, which shows which leaves a backward has committed to.

A *commit* is the moment a piece's contribution reaches a leaf's `.grad`. Autograd makes the
gradient, or adds to it in place, which raises its version by one. So two looks at all gradients
show the leaves with a commit, without a hook on any of them. They also show whether other code has
changed a gradient in the middle of a batch.

Versions belong to memory, not to tensors: where gradients are views of one buffer, a commit to one
raises the version of all. Source: torch/csrc/autograd/functions/accumulate_grad.h;
docs/internals/autograd.md#commit-marks and #gradients-that-share-memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.weak import TensorWeakRef

from elastic_mbs.dispatch import Contents, hides_edits
from elastic_mbs.errors import BackwardInsideError, GradientsChangedError
from elastic_mbs.rollback.graph import has_hook

Grads = list[torch.Tensor | None]

# The version of a gradient that is not there, or of an inference tensor, to which autograd does not
# write.
NO_VERSION = -1

_GRAD, _VERSION, _CDATA, _HOOKS = map(
    attrgetter, ("grad", "_version", "_cdata", "_post_accumulate_grad_hooks")
)
_STORAGE, _OFFSET, _ADDRESS = (
    torch.Tensor.untyped_storage,
    torch.Tensor.storage_offset,
    torch.Tensor.data_ptr,
)
_is_tensor = partial(is_not, None)


class _Extra(NamedTuple):
    """A leaf outside the model, and its gradient as it was noted.

    The leaf is held weakly: a step can make a new one for every piece.
    """

    leaf: TensorWeakRef
    grad: torch.Tensor | None
    version: int

    @classmethod
    def of(cls, leaf: torch.Tensor) -> _Extra:
        return cls(TensorWeakRef(leaf), leaf.grad, _version(leaf.grad))


class Observation(NamedTuple):
    """The gradients at one moment.

    Attributes:
        grads: the gradients of the model's leaves.
        versions: their versions.
        extra: the leaves outside the model.
        complete: versions tell everything: each leaf has a gradient with a version and no hook that
            could replace it, and there is no extra leaf.
    """

    grads: Grads
    versions: list[int]
    extra: dict[int, _Extra]
    complete: bool = False


class Ledger:
    """The leaves that a backward can reach, and their gradients as they were last noted.

    Leaves of the model are known from the start. Extra leaves (a prompt, learned loss weights, a
    batch that requires grad) are added by the census of a call and dropped at its end.
    """

    def __init__(self) -> None:
        self._model: dict[int, torch.Tensor] = {}
        self._leaves: list[torch.Tensor] = []
        self._none: list[int] = []
        self._noted = Observation([], [], {})
        self._contents: Contents | None = None  # of gradients, where versions do not tell of edits

    def set_leaves(self, leaves: Iterable[torch.Tensor]) -> None:
        """Set the leaves of the model."""
        self._model = {id(leaf): leaf for leaf in leaves}
        self._leaves = list(self._model.values())
        # The versions where there is no gradient at all.
        self._none = [NO_VERSION] * len(self._leaves)
        self.forget()

    def add_extra(self, leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Add the leaves that are not known yet, with their present gradients; return them."""
        new = [leaf for leaf in leaves if leaf not in self]
        self._noted.extra.update((id(leaf), _Extra.of(leaf)) for leaf in new)
        return new

    def __contains__(self, leaf: object) -> bool:
        extra = self._noted.extra.get(id(leaf))
        return id(leaf) in self._model or (extra is not None and extra.leaf() is leaf)

    def has_any(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Return whether one of these leaves is known.

        It is asked in every call about all leaves of every optimizer.
        """
        if not self._model.keys().isdisjoint(map(id, leaves)):
            return True
        return bool(self._noted.extra) and any(leaf in self for leaf in leaves)

    def leaves(self) -> list[torch.Tensor]:
        """Return every leaf that is still there."""
        return [*self._leaves, *self.extra_leaves()]

    def extra_leaves(self) -> list[torch.Tensor]:
        """Return the leaves outside the model that are still there."""
        return [leaf for extra in self._noted.extra.values() if (leaf := extra.leaf()) is not None]

    def observe(self, *, kept: bool = False) -> Observation:
        """Return all gradients as they are now.

        Args:
            kept: look at versions alone where all gradients were there when they were noted. A
                look at a leaf's gradient takes longer than one at a version. `check_kept`, or the
                end of the call, detects a replaced gradient later.
        """
        grads, _, extra, complete = self._noted
        if kept and complete:
            return Observation(grads, list(map(_VERSION, grads)), extra, True)
        if extra:
            extra = {id(leaf): _Extra.of(leaf) for leaf in self.extra_leaves()}
        grads = list(map(_GRAD, self._leaves))
        if not any(map(is_not, grads, repeat(None))):
            return Observation(grads, self._none, extra)
        versions = _versions(grads)
        return Observation(
            grads,
            versions,
            extra,
            not extra and NO_VERSION not in versions and not any(map(_HOOKS, self._leaves)),
        )

    def note(self) -> None:
        """Note all gradients as they are now."""
        self._noted = self.observe()
        self._note_contents()

    def forget(self) -> None:
        """Drop the notes and the extra leaves, which keeps no gradient alive."""
        self._noted = Observation([], [], {})  # in one step: an interrupt leaves all or nothing
        self._contents = None

    def with_gradient(self) -> set[int]:
        """Return the ids of the model's leaves that had a gradient when they were noted."""
        return (
            set()
            if self._noted.versions is self._none
            else set(map(id, compress(self._leaves, map(is_not, self._noted.grads, repeat(None)))))
        )

    def _note_contents(self) -> None:
        if not hides_edits():
            self._contents = None
            return
        grads, _, extra, _ = self._noted
        self._contents = Contents(chain(grads, map(_GRAD, extra.values())))

    def unchanged(self, *, kept: bool = False) -> bool:
        """Return whether all gradients are the same tensors, and nothing was written to them.

        Args:
            kept: look at versions alone (see `observe`).
        """
        if self._contents is not None:
            self._contents.raise_versions()
        before = self._noted
        if kept and before.complete:
            return list(map(_VERSION, before.grads)) == before.versions
        if not all(map(is_, map(_GRAD, self._leaves), before.grads)):
            return False
        same = before.versions is self._none or _versions(before.grads) == before.versions
        return same and not (before.extra and self.changed())

    def changed(self, since: Observation | None = None) -> list[torch.Tensor]:
        """Return the leaves whose gradient has changed, once for each write to it.

        Args:
            since: the gradients of before; None: as they were noted.
        """
        if self._contents is not None:
            self._contents.raise_versions()
        before = since or self._noted
        noted = [*zip(self._leaves, before.grads, before.versions, strict=True)]
        noted += [
            (leaf, extra.grad, extra.version)
            for extra in before.extra.values()
            if (leaf := extra.leaf()) is not None
        ]
        found: list[torch.Tensor] = []
        for leaf, noted_grad, version in noted:
            grad = leaf.grad
            found += [leaf] if grad is not noted_grad else [leaf] * (_version(grad) - version)
        return found

    def advance(self, seen: Observation, expected: Collection[int]) -> bool:
        """Note `seen` where an expected number of commits explains it.

        Args:
            seen: all gradients after a backward.
            expected: the numbers of commits that clean backwards had.

        Returns:
            False where that needs a look at each leaf. Nothing is noted then.
        """
        before = self._noted
        if before.extra:
            return False
        if seen.grads is before.grads or all(map(is_, seen.grads, before.grads)):
            commits = sum(seen.versions) - sum(before.versions)
        elif before.versions is self._none and not _share_memory(seen.grads):
            commits = sum(map(is_not, seen.grads, repeat(None)))
        else:
            return False
        if commits not in expected:
            return False
        self._noted = seen
        if self._contents is not None or hides_edits():
            self._note_contents()
        return True

    def check_kept(self, seen: Observation | None = None) -> None:
        """Check that no other code has replaced a gradient since the last note.

        A hook can replace a gradient, and so can autograd where it is sparse.

        Args:
            seen: no gradient may have changed since this observation either.
        """
        pairs = zip(self._leaves, self._noted.grads, strict=False)
        replaced = [
            (leaf, noted) for leaf, noted in pairs if noted is not None and leaf.grad is not noted
        ]
        for leaf, noted in replaced if self._noted.complete else ():
            if noted.layout is torch.strided and not has_hook(leaf):
                self._refuse(leaf)
        if seen is not None and not (replaced and seen.grads is self._noted.grads):
            self.check_unchanged(seen)

    def check_unchanged(self, since: Observation | None = None) -> None:
        """Check that no other code has changed a gradient.

        Args:
            since: the gradients of before; None: as they were noted.

        Raises:
            BackwardInsideError: a gradient has appeared, so a backward has run.
            GradientsChangedError: a gradient was cleared, replaced or edited.
        """
        changed = self.changed(since)
        if not changed:
            return
        before = since or self._noted
        had = {
            id(leaf)
            for leaf, grad in zip(self._leaves, before.grads, strict=True)
            if grad is not None
        }
        had.update(key for key, extra in before.extra.items() if extra.grad is not None)
        if any(id(leaf) not in had and leaf.grad is not None for leaf in changed):
            raise BackwardInsideError(
                "backward() ran inside the step function: return the loss (or hand it to "
                "micro.backward), and leave backward to the engine"
            )
        self._refuse(changed[0])

    def _refuse(self, leaf: torch.Tensor) -> NoReturn:
        raise GradientsChangedError(
            f"the gradient of a leaf of shape {tuple(leaf.shape)} was "
            f"{'cleared' if leaf.grad is None else 'changed'} in the middle of a batch: "
            "call zero_grad(), clip or edit gradients after the whole batch, next to "
            "optimizer.step(), and leave backward() to the engine"
        )


def _versions(grads: Grads) -> list[int]:
    """Return the versions of gradients.

    It runs in every call, so it runs no line of Python for each of them where all are there.
    """
    try:
        return list(map(_VERSION, grads))
    except (AttributeError, RuntimeError):  # None and inference tensors have none
        return [_version(grad) for grad in grads]


def _version(grad: torch.Tensor | None) -> int:
    return NO_VERSION if grad is None or grad.is_inference() else grad._version


# ---------------------------------------------------------------------- shared memory


def _share_memory(grads: Iterable[torch.Tensor | None]) -> bool:
    there: list[Any] = list(filter(_is_tensor, grads))
    with suppress(RuntimeError):  # some tensors have no address
        # Each begins where its memory does. This look takes half the time.
        if len(set(map(_ADDRESS, there))) == len(there) and not any(map(_OFFSET, there)):
            return False
    try:
        memory = set(map(_CDATA, map(_STORAGE, there)))
    except NotImplementedError:  # a sparse one has no memory of its own
        return _share_memory(grad for grad in there if grad.layout is torch.strided)
    return len(memory) < len(there)


def separate(leaves: Sequence[torch.Tensor]) -> None:
    """Give gradients memory of their own, where autograd has made several in one place.

    Where two leaves meet in one addition, each through a view, both get views of one tensor. The
    contribution of the next piece to one would be added to both.
    """
    held = [
        (grad.untyped_storage()._cdata, leaf, grad)
        for leaf in leaves
        if (grad := leaf.grad) is not None and grad.layout is torch.strided
    ]
    if len({storage for storage, _, _ in held}) == len(held):
        return
    taken: dict[int, list[tuple[int, int]]] = {}
    for storage, leaf, grad in held:
        if grad.numel():
            start = int(grad.storage_offset()) * grad.itemsize
            stop = (
                start
                + int(
                    1
                    + sum((n - 1) * step for n, step in zip(grad.shape, grad.stride(), strict=True))
                )
                * grad.itemsize
            )
            places = taken.setdefault(storage, [])
            if any(start < end and begin < stop for begin, end in places):
                leaf.grad = grad.clone()
            places.append((start, stop))
