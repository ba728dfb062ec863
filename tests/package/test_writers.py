"""The search for the modules that assign a field finds every way of doing so."""

import pytest

from tests.helpers.writers import find_writers

STATE = """
class State:
    phase: int = 0
    pieces: "list[Piece]"

    def __init__(self):
        self.size = 1

    def first(self) -> "Piece":
        return self.pieces[0]

class Piece:
    data: object = None
"""

ELSEWHERE = {
    "a parameter": "def f(state: State): state.phase = 1",
    "a parameter that may be None": "def f(state: 'State | None'): state.phase = 1",
    "an attribute set by a parameter": (
        "class Call:\n"
        "    def __init__(self, state: State): self.state = state\n"
        "    def end(self): self.state.phase = 1"
    ),
    "an annotated attribute": "class Call:\n    x: State\n    def end(self): self.x.phase = 1",
    "a local name": "def f(state: State):\n    same = state\n    same.phase = 1",
    "a function inside": "def f(state: State):\n    def g(): state.phase = 1\n    g()",
    "an object made there": "def f():\n    state = State()\n    state.phase += 1",
    "the result of a function": "def g() -> State: ...\ndef f(): g().phase = 1",
    "a tuple": "def f(state: State): state.phase, other = 1, 2",
    "a deletion": "def f(state: State): del state.phase",
    "a name given as text": "def f(state: State): setattr(state, 'phase', 1)",
    "a loop": "def f(states: list[State]):\n    for state in states: state.phase = 1",
    "a loop in step": (
        "def f(states: list[State]):\n    for n, state in enumerate(states): state.phase = n"
    ),
    "a loop as target": "def f(state: State):\n    for state.phase in range(3): ...",
    "a manager": (
        "@contextmanager\ndef g() -> Iterator[State]: yield State()\n"
        "def f():\n    with g() as state: state.phase = 1"
    ),
    "a subclass": "class Other(State):\n    def end(self): self.phase = 1",
    "one of two": "def f(state: State, n: int):\n    x = state if n else None\n    x.phase = 1",
}


@pytest.mark.parametrize("code", ELSEWHERE.values(), ids=ELSEWHERE)
def test_an_assignment_elsewhere_is_found(code: str) -> None:
    found = find_writers({"house.engine.state": STATE, "house.other": code}, "house.engine")
    assert found.modules["State.phase"] == {"house.other"}


def test_a_field_of_two_modules_is_told() -> None:
    sources = {"house.engine.state": STATE, "house.other": "def f(state: State): state.size = 2"}
    assert find_writers(sources, "house.engine").several() == {
        "State.size": ["house.engine.state", "house.other"]
    }


def test_a_field_of_a_result_is_of_the_results_class() -> None:
    code = "def f(state: State): state.first().data = 1"
    found = find_writers({"house.engine.state": STATE, "house.other": code}, "house.engine")
    assert found.modules["Piece.data"] == {"house.other"}


def test_the_same_name_of_another_class_does_not_count() -> None:
    code = "class Other:\n    def f(self, model: Module): self.phase = model.phase = 1"
    found = find_writers({"house.engine.state": STATE, "house.other": code}, "house.engine")
    assert found.modules == {"State.size": {"house.engine.state"}}
    assert found.unknown == []


def test_an_unknown_object_is_told_where_the_room_is_known() -> None:
    code = "from house.engine.state import State\ndef f(thing): thing.phase = 1"
    found = find_writers({"house.engine.state": STATE, "house.other": code}, "house.engine")
    assert found.unknown == ["house.other:2 thing.phase"]
