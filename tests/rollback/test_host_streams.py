"""Python's and numpy's streams: the states are their own, read in full only where they moved."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.rollback import host_streams
from elastic_mbs.rollback.host_streams import (
    HostStream,
    numpy_tells,
    numpys_stream,
    python_tells,
    pythons_stream,
)
from elastic_mbs.rollback.random_streams import _equal

NUMPY: Any = np.random  # its stubs lack some functions


def numpys_state() -> Any:
    return NUMPY.get_state(legacy=False)


Moves = Mapping[str, Callable[[], object]]
NUMPYS: Moves = {
    "uniform": NUMPY.random_sample,
    "normal, in pairs": NUMPY.standard_normal,
    "integer": lambda: NUMPY.randint(5),
    "small integer": lambda: NUMPY.randint(5, dtype=np.int8),
    "binomial": lambda: NUMPY.binomial(9, 0.3),
    "gamma": lambda: NUMPY.gamma(2.0),
    "permutation": lambda: NUMPY.permutation(5),
    "seed": lambda: NUMPY.seed(1),
    "nothing": lambda: None,
}
PYTHONS: Moves = {
    "uniform": random.random,
    "normal, in pairs": lambda: random.gauss(0.0, 1.0),
    "integer": lambda: random.randrange(5),
    "bits": lambda: random.getrandbits(70),
    "choice": lambda: random.choice("abc"),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "seed": lambda: random.seed(1),
    "nothing": lambda: None,
}
KINDS: dict[str, tuple[Callable[[], HostStream], Callable[[], Any], Any, Moves]] = {
    "numpy": (numpys_stream, numpys_state, NUMPY.set_state, NUMPYS),
    "python": (pythons_stream, random.getstate, random.setstate, PYTHONS),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    before = [(put, read()) for _, read, put, _ in KINDS.values()]
    yield
    for put, state in before:
        put(state)


def test_the_memory_of_both_tells_of_draws() -> None:
    assert numpy_tells()
    assert python_tells()


@each_kind
@given(data=st.data())
def test_the_state_is_the_streams_own_after_any_moves(kind: str, data: st.DataObject) -> None:
    make, read, put, moves = KINDS[kind]
    moves["seed"]()
    stream, kept = make(), [read()]
    for name in data.draw(st.lists(st.sampled_from([*moves, "keep", "put back"]), max_size=30)):
        if name == "keep":
            kept.append(read())
        elif name == "put back":
            put(kept[-1])
        else:
            moves[name]()
        assert _equal(stream.get_state(), read()), name


@each_kind
def test_it_is_read_in_full_only_where_it_has_moved(kind: str) -> None:
    make, _, _, moves = KINDS[kind]
    stream = make()
    first = stream.get_state()
    assert stream.get_state() is first
    moves["uniform"]()
    assert stream.get_state() is not first


@each_kind
def test_one_number_of_a_pair_counts(kind: str) -> None:
    # The second normal number moves no word of the stream, and neither does putting it back.
    make, read, put, moves = KINDS[kind]
    normal = moves["normal, in pairs"]
    moves["seed"]()
    normal()
    before, stream = read(), make()
    wanted = normal()
    after = stream.get_state()
    put(before)
    again = stream.get_state()
    assert not _equal(again, after)
    stream.set_state(again)
    assert normal() == wanted


@pytest.mark.parametrize("other", [NUMPY.PCG64, NUMPY.MT19937])
def test_a_generator_put_in_the_place_of_numpys_is_read(other: Callable[[int], Any]) -> None:
    stream, before = numpys_stream(), NUMPY.get_bit_generator()
    stream.get_state()
    NUMPY.set_bit_generator(other(5))
    try:
        seen = stream.get_state()
        NUMPY.random_sample()
        assert _equal(stream.get_state(), numpys_state())
        assert not _equal(stream.get_state(), seen)
    finally:
        NUMPY.set_bit_generator(before)


@each_kind
def test_where_memory_does_not_tell_every_read_is_one_in_full(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_streams, f"{kind}_tells", lambda: False)
    stream = KINDS[kind][0]()
    first, second = stream.get_state(), stream.get_state()
    assert first is not second
    assert _equal(first, second)


@each_kind
def test_memory_that_misses_a_draw_is_not_trusted(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells = getattr(host_streams, f"{kind}_tells").__wrapped__
    monkeypatch.setattr(host_streams, f"memory_of_{kind}", lambda *_: lambda: b"the same")
    assert not tells()
