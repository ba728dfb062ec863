"""Graphs and batches of them as PyTorch Geometric has them, as far as a cut sees them."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


class Store(dict[str, Any]):
    """The fields of a graph, or of a batch."""

    _key = None


class Data:
    """A graph."""

    def __init__(self, **fields: Any) -> None:
        vars(self)["stores"] = [Store(fields)]

    def __getattr__(self, name: str) -> Any:
        fields = vars(self)["stores"][0]
        if name not in fields:
            raise AttributeError(name)
        return fields[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            vars(self)[name] = value
        else:
            self.stores[0][name] = value

    def __getitem__(self, name: str) -> Any:
        return self.stores[0][name]

    def __copy__(self) -> "Data":
        new = object.__new__(type(self))
        vars(new).update(vars(self), stores=[Store(self.stores[0])])
        return new

    def __cat_dim__(self, name: str, *_: Any) -> int:
        return -1 if "index" in name else 0

    def __inc__(self, name: str, *_: Any) -> int:
        return len(self.x) if "index" in name else 0

    def keys(self) -> list[str]:
        return list(self.stores[0])

    def to_dict(self) -> dict[str, Any]:
        return dict(self.stores[0])

    def apply(self, fn: Callable[[Tensor], Tensor]) -> "Data":
        tensors = {name: each for name, each in self.to_dict().items() if torch.is_tensor(each)}
        self.stores[0].update({name: fn(each) for name, each in tensors.items()})
        return self


class Batch(Data):
    """A batch of graphs."""

    @property
    def num_graphs(self) -> int:
        if "_num_graphs" in vars(self):
            return int(self._num_graphs)
        if "ptr" in self.stores[0]:
            return len(self.ptr) - 1
        return int(self.batch.max()) + 1

    @classmethod
    def from_data_list(cls, graphs: list[Data], follow_batch: Iterable[str] = ()) -> "Batch":
        assert not follow_batch
        new = cls()
        new._num_graphs, new._slice_dict, new._inc_dict = len(graphs), {}, {}
        for name in graphs[0].to_dict():
            values = [graph[name] for graph in graphs]
            if not torch.is_tensor(values[0]):
                new.stores[0][name] = values
                new._slice_dict[name] = torch.arange(len(graphs) + 1)
                new._inc_dict[name] = None
                continue
            dim = graphs[0].__cat_dim__(name)
            lengths = [each.size(dim) for each in values]
            added = [0, *accumulate(graph.__inc__(name) for graph in graphs)][:-1]
            joined = [each + inc if inc else each for each, inc in zip(values, added, strict=True)]
            new.stores[0][name] = torch.cat(joined, dim)
            new._slice_dict[name] = torch.tensor([0, *accumulate(lengths)])
            new._inc_dict[name] = torch.tensor(added)
        nodes = torch.tensor([len(graph.x) for graph in graphs])
        new.batch = torch.repeat_interleave(torch.arange(len(graphs)), nodes)
        new.ptr = torch.nn.functional.pad(nodes.cumsum(0), (1, 0))
        return new

    def index_select(self, places: Iterable[int]) -> list[Data]:
        return [self._graph(place) for place in places]

    def to_data_list(self) -> list[Data]:
        return self.index_select(range(self.num_graphs))

    def _graph(self, place: int) -> Data:
        fields = dict[str, Any]()
        for name, slices in self._slice_dict.items():
            value, start, stop = self[name], int(slices[place]), int(slices[place + 1])
            if torch.is_tensor(value):
                part = value.narrow(self.__cat_dim__(name), start, stop - start)
                inc = int(self._inc_dict[name][place])
                fields[name] = part - inc if inc else part
            else:
                fields[name] = value[place]
        return Data(**fields)
