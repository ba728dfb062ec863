"""A training run under stress: a model, its loss, its batches and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elastic_mbs.errors import UsageError
from elastic_mbs.memory.oom import classify
from elastic_mbs.testing import InjectOOM


class InterpretedBackend:
    """A torch.compile backend that runs its graphs operation by operation and counts them.

    A dispatch mode sees nothing there.
    """

    def __init__(self) -> None:
        self.inject: InjectOOM | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)(graph, inputs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]  # it has no annotations

        backend = self

        class Interpreter(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                if backend.inject is not None and hasattr(target, "_schema"):
                    backend.inject.step(str(target))
                return super().call_function(target, args, kwargs)

        return make_boxed_func(lambda *values: Interpreter(graph).run(*values))


@dataclass(frozen=True)
class Subject:
    """A training run that is still to be made."""

    model: nn.Module
    # loss of a piece, as ElasticMBS takes it; with `over`, its embeddings
    loss_fn: Callable[[Any], Any]
    # A sequence, taken again from its start after its last, or a function of the step's number.
    batches: Sequence[Any] | Callable[[int], Any]
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = lambda parameters: (
        torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    )
    # options of `ElasticMBS`, such as `count=`
    options: dict[str, Any] = field(default_factory=dict)
    name: str = "model"  # name in tables
    extra: tuple[Tensor, ...] = ()  # leaves outside the model
    separable: bool = True  # the batch's gradient does not depend on how it is split
    # Neither do its buffers, which change: everything is compared with the whole batch alone.
    whole: bool = False
    tolerance: float = 1e-12  # largest difference from the reference, relative to its largest entry
    # Loss of all embeddings, where it compares samples.
    over: Callable[[Any], Any] | None = None
    # Counter of the operations that run inside a compiled graph.
    backend: InterpretedBackend | None = None

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.leaves()[0].device

    def leaves(self) -> list[Tensor]:
        """Return every trainable leaf."""
        return [*self.model.parameters(), *self.extra]

    def batch(self, step: int) -> Any:
        """Return the batch of a step, from 0."""
        try:
            return (
                self.batches(step)
                if callable(self.batches)
                else self.batches[step % len(self.batches)]
            )
        except Exception as error:
            if classify(error) is not None:
                raise
            raise UsageError(
                f"--model {self.name}: there is no batch for step {step}: {one_line(error)}"
            ) from error


@contextmanager
def naming(model: str, what: str) -> Iterator[None]:
    """Turn every error of the user's code in the block into a `UsageError` of one line.

    It names the model, says that `what` does not work, and quotes the error.
    """
    try:
        yield
    except UsageError as error:  # the package's own words say enough
        text = words(error)
        raise UsageError(text if text.startswith("--") else f"--model {model}: {text}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {model}: {what}: {one_line(error)}") from error


def words(error: BaseException) -> str:
    """Return an error's text, on one line."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def one_line(error: BaseException) -> str:
    """Return an error's type and text, on one line."""
    return f"{type(error).__name__}: {words(error)}".rstrip(": ")
