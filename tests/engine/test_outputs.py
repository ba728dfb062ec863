"""Outputs have one type and one place, however the batch was split."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs import PerPiece, UsageError
from elastic_mbs.batch.join import join
from elastic_mbs.engine.outcome import result as result_module
from elastic_mbs.engine.outcome.result import Near, StoredOutput
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import elastic, mlp, off_by, through, whole_gradient

PAD = 7
LENGTHS = torch.tensor([3, 1, 4, 1, 5, 2, 6, 2])


def generated(lengths: Tensor) -> Tensor:
    """Return texts, as wide as the longest of the piece, like `generate` does."""
    places = torch.arange(int(lengths.max()))
    return torch.where(places < lengths[:, None], places + 1, PAD)


@pytest.mark.parametrize("size", [8, 3, 1])
def test_ragged_outputs_filled_up_are_those_of_one_piece(size: int) -> None:
    wanted = generated(LENGTHS)
    model = nn.Linear(1, 1)
    mbs = elastic(model, micro_batch_size=size)
    assert torch.equal(mbs.evaluate(generated, LENGTHS, pad=PAD), wanted)
    by_name = mbs.evaluate(
        lambda b: {"texts": generated(b), "odds": generated(b) / 2},
        LENGTHS,
        pad={"texts": PAD, "odds": PAD / 2},
    )
    assert torch.equal(by_name["texts"], wanted)
    assert torch.equal(by_name["odds"], wanted / 2)
    with InjectOOM(at=[3]):
        assert torch.equal(mbs.evaluate(generated, LENGTHS, pad=PAD), wanted)
    padded = elastic(model, micro_batch_size=size, pad=PAD)
    assert torch.equal(padded.evaluate(generated, LENGTHS), wanted)
    result = padded.backward(lambda b: (model(b[:, None].float()).mean(), generated(b)), LENGTHS)
    assert torch.equal(result.outputs, wanted)


@pytest.mark.parametrize("size", [8, 4, 3, 1])
def test_a_list_with_one_tensor_per_sample_is_a_list_however_the_batch_is_split(size: int) -> None:
    found = elastic(nn.Linear(1, 1), micro_batch_size=size).evaluate(
        lambda b: [text[: int(n)] for text, n in zip(generated(b), b, strict=True)], LENGTHS
    )
    assert type(found) is list
    assert [len(text) for text in found] == LENGTHS.tolist()


def test_ragged_outputs_without_a_value_to_fill_them_up_are_refused() -> None:
    """In one piece they would be a tensor, and a list of tensors after memory ran out."""
    model, batch = nn.Linear(1, 1), LENGTHS

    def loss_fn(b: Tensor) -> Any:
        return model(b[:, None].float()).mean(), {"texts": generated(b)}

    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(
        UsageError, match=r"shapes \[\(4,\), \(6,\)\].*\n.*pad=0\)\n.*list"
    ) as caught:
        mbs.evaluate(generated, batch)
    assert "for this output alone" not in str(caught.value)
    result = mbs.backward(loss_fn, batch)
    for _ in range(2):  # it does not turn into another type
        with pytest.raises(UsageError, match=r"the output texts has rows.*\n.*\{'texts': 0\}"):
            _ = result.outputs
    exact = whole_gradient(model, lambda net: net(batch[:, None].float()).mean())
    assert off_by(model, exact) <= 1e-6


@pytest.mark.parametrize(
    ("pad", "value", "message"),
    [
        (-1, generated(LENGTHS).to(torch.uint8), "pad=-1 is no value of the output"),
        (2, generated(LENGTHS) > 0, "torch.bool"),
        (float("-inf"), generated(LENGTHS), "pad=-inf is no value"),
        (0.5, generated(LENGTHS).numpy(), "pad=0.5 is no value.*int64"),
    ],
)
def test_a_value_that_the_outputs_cannot_hold_is_refused(
    pad: float, value: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        join([value[:4], value[4:, :5]], [4, 4], pad=pad)


@pytest.mark.parametrize("pad", ["0", True, {"texts": "0"}, {0: 0}, [0]])
def test_a_pad_that_is_no_number_is_refused(pad: Any) -> None:
    with pytest.raises(UsageError, match=r"neither a number nor a dict of numbers"):
        elastic(mlp(), pad=pad)
    with pytest.raises(UsageError, match=r"neither a number nor a dict of numbers"):
        elastic(mlp()).evaluate(mlp(), torch.zeros(2, 6), pad=pad)


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=5
    ),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
    st.booleans(),
)
def test_pieces_of_any_width_are_filled_up_at_their_ends(
    shapes: list[tuple[int, int, int]], dtype: torch.dtype, array: bool
) -> None:
    pieces = [torch.ones(shape).to(dtype) for shape in shapes]
    joined = join(
        [piece.numpy() if array else piece for piece in pieces],
        [shape[0] for shape in shapes],
        pad=0,
    )
    assert isinstance(joined, np.ndarray if array else Tensor)
    found, start = torch.as_tensor(joined), 0
    assert found.dtype is dtype
    assert found.shape[1:] == tuple(max(sizes) for sizes in list(zip(*shapes, strict=True))[1:])
    for piece in pieces:
        n, *widths = piece.shape
        rows = found[start : start + n]
        assert torch.equal(rows[:, : widths[0], : widths[1]], piece)
        assert rows.sum() == piece.sum()
        start += n


# ---------------------------------------------------------------------- with the runtime disabled


@pytest.mark.parametrize("enabled", [True, False])
def test_outputs_have_the_same_types_with_the_runtime_disabled(enabled: bool) -> None:
    model, x = mlp(), torch.randn(6, 6, dtype=torch.float64)
    mbs = elastic(model, enabled=enabled, outputs="cpu")
    found = mbs.evaluate(lambda b: {"y": model(b), "mean": model(b).mean(), "n": len(b)}, x)
    assert torch.equal(found["y"], model(x).detach())
    assert isinstance(found["mean"], PerPiece)
    assert isinstance(found["n"], PerPiece)
    assert found["n"].sum() == 6
    # a loss over embeddings runs once for the batch, and so do its outputs come
    outputs = mbs.backward_embeddings(
        model, lambda e: ((e @ e.T).square().mean(), e.detach().mean()), x
    ).outputs
    assert isinstance(outputs, Tensor)
    assert outputs.item() == pytest.approx(model(x).mean().item(), rel=1e-12)
    whole = mbs.backward(lambda b: ((y := model(b)).mean(), {"y": y, "mean": y.mean()}), x)
    assert isinstance(whole.outputs["mean"], PerPiece)


def test_a_batch_that_could_not_be_cut_has_outputs_as_they_are_with_the_runtime_disabled() -> None:
    model, x = mlp(), torch.randn(6, 6, dtype=torch.float64)
    mbs = elastic(model, enabled=False)
    assert torch.equal(mbs.evaluate(lambda b: model(b()), lambda: x), model(x).detach())
    result = mbs.backward(lambda b: ((y := model(b())).mean(), y), lambda: x)
    assert torch.equal(result.outputs, model(x).detach())


# ---------------------------------------------------------------------- where they are kept


class OnDevice(Near):
    """The place of outputs whose batch lies on an accelerator, as far as it says."""

    @property
    def on_device(self) -> bool:
        return True


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([8, 80, 800, 4096]))
def test_where_outputs_are_kept_does_not_depend_on_the_split(
    size: int, width: int, small: int
) -> None:
    samples, place = 64, OnDevice([], 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_module, "SMALL", small)
        kept = [
            StoredOutput(torch.zeros(stop - start, width), place, stop - start).on_host
            for start in range(0, samples, size)
            for stop in [min(start + size, samples)]
        ]
        alone = [
            StoredOutput({"n": torch.zeros(())}, place, n).on_host for n in range(1, samples + 1)
        ]
    assert set(kept) == {samples * width * 4 > small}
    assert set(alone) == {samples * 4 > small}


def test_small_outputs_stay_with_their_batch_and_large_ones_go_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(result_module, "SMALL", 100)
    value = torch.arange(6.0)
    stays = StoredOutput((value, "text"), OnDevice([], 6), 6)
    assert not stays.on_host
    assert stays.kept
    assert stays.get()[0].data_ptr() == value.data_ptr()
    moved = StoredOutput((value, "text"), OnDevice([], 600), 6)
    assert moved.on_host
    assert not moved.kept
    assert moved.nbytes == value.nbytes
    assert moved.get()[1] == "text"
    assert StoredOutput(value, Near([value], 6), 6).on_host  # its batch lies on the host
    # pieces of which some are large are joined on the host
    both = result_module.StepResult(
        ((0, 6), (6, 12)), 6, _outputs=[StoredOutput(value, OnDevice([], 12), 6), moved]
    )
    assert both._outputs[0] is not None
    assert not both._outputs[0].on_host
    assert isinstance(both.outputs, PerPiece)
    mbs = elastic(mlp(), micro_batch_size=2)
    x = torch.randn(4, 6, dtype=torch.float64)
    model = mlp()
    outputs = through(1, mbs, lambda b: ((y := model(b)).mean(), y), x).outputs
    assert outputs.device.type == "cpu"
