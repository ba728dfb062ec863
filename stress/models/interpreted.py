"""torch.compile, so that single operations of its graphs can be made to fail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elastic_mbs.testing import InjectOOM


class InterpretedBackend:
    """A torch.compile backend that runs the aot_autograd graphs operation by operation, so that each can be made to fail.

    torch.compile does not run under a dispatch mode; inside its graphs the operations are counted here instead.
    """

    def __init__(self) -> None:
        self.inject: InjectOOM | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        """Compiles nothing: interprets."""
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
