"""No advised line is wrong where its meaning is true, and what lists leave open is not guessed.

More batches: `ADVICE_BATCHES=10000 pytest tests/batch/test_advice.py`, in half a minute.
"""

import os
import re
from collections import Counter
from typing import Any

import pytest
import torch

from elastic_mbs import cut
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError
from tests.helpers.known_batches import Known, Maker, meaning_of, ranges, same

BATCHES = int(os.environ.get("ADVICE_BATCHES", "600"))


def is_meant(known: Known, text: str, dims: dict[str, Any]) -> bool:
    """Return whether what a line says is true of the batch."""
    length = re.search(r"if it has (\d+) samples", text)
    said = {name: meaning_of(reading) for name, reading in dims.items()}
    return (length is None or int(length[1]) == known.samples) and all(
        known.meanings.get(name) == meaning for name, meaning in said.items()
    )


def outcome(known: Known, dims: dict[str, Any], asked: int = 0) -> str:
    """Read a batch, follow each line that is true of it, and return what came out."""
    try:
        view = BatchView(known.batch, dims)
        right = view.length == known.samples and all(
            same(view.piece(*each), known.piece(*each)) for each in ranges(known.samples)
        )
    except BatchError as error:
        text = str(error)
        assert len(text.splitlines()) < 15, text
        assert max(map(len, text.splitlines())) < 300, text
        assert "dims=cut.whole(" not in text, text
        assert asked < 4, text
        lines = [
            (line, eval(line.split("dims=")[1], {"cut": cut}))
            for line in text.splitlines()
            if "dims=cut" in line or 'dims={"' in line
        ]
        for line, way in lines:
            if is_meant(known, line, way):
                came = outcome(known, dims | way, asked + 1)
                assert came in ("right", "followed", "nothing advised", "hidden"), (came, text)
                return "followed"
        return "nothing advised"
    return "right" if right else "hidden" if known.hidden else "wrong"


def test_each_advised_line_is_right_and_nothing_that_lists_leave_open_is_guessed() -> None:
    found = Counter[str]()
    for seed in range(BATCHES):
        known = Maker(seed).known()
        came = outcome(known, {})
        assert came != "wrong", (seed, known.batch)
        found[came] += 1
    # all of these occur, so that none is left out by a mistake of the test
    assert all(found[each] > BATCHES // 20 for each in ("right", "followed", "nothing advised"))
    assert found["hidden"] < BATCHES // 5


def test_nothing_tells_to_whom_fewer_rows_than_samples_belong() -> None:
    labels = torch.tensor([0, 1, 1, 0, 0, 1, 0, 0])  # of two classes: as many ones as rows
    for rows in (torch.rand(3), torch.rand(3, 4), torch.rand(3, 8), torch.tensor([2, 3, 3])):
        with pytest.raises(BatchError) as caught:
            BatchView({"x": torch.rand(8, 3), "y": labels, "prototypes": rows}, {})
        assert "if it has 8 samples" not in str(caught.value)
