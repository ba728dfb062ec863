"""Pictures and videos go with their samples, as the placeholder tokens or a key tell."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, cut
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError
from tests.helpers.ragged import same

IMAGE, VIDEO = 90, 91
# of each sample: its pictures, each with the height and width in patches
SIZES = st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 4, 6]))
PICTURES = st.lists(st.lists(SIZES, max_size=3), min_size=1, max_size=5)
Sizes = list[list[tuple[int, int]]]


def texts(tokens: list[list[int]], token: int = IMAGE) -> Tensor:
    """Return texts with a run of placeholders for each picture."""
    rows = []
    for number, each in enumerate(tokens):
        row = [number + 1]
        for count in each:
            row += [80, *[token] * count, 81]
        rows.append(row)
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def qwen(sizes: Sizes, *, first: int = 0, width: int | None = None) -> dict[str, Any]:
    """Return a batch of Qwen2-VL; a sample's patches begin with `first` and its number."""
    ids = texts([[height * width // 4 for height, width in each] for each in sizes])
    if width is not None:
        ids = nn.functional.pad(ids, (0, width - ids.shape[1]))
    ids[:, 0] += first
    thw = [(1, *size) for each in sizes for size in each]
    patches = [
        float(first + number)
        for number, each in enumerate(sizes)
        for height, width in each
        for _ in range(height * width)
    ]
    return {
        "input_ids": ids,
        "pixel_values": torch.tensor(patches)[:, None] if patches else None,
        "image_grid_thw": torch.tensor(thw) if thw else None,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


@settings(max_examples=100, deadline=None)
@given(PICTURES.filter(any), st.booleans(), st.data())
def test_patches_of_pictures_of_any_size_go_with_their_samples(
    sizes: Sizes, by_model: bool, data: st.DataObject
) -> None:
    batch = qwen(sizes)
    width = batch["input_ids"].shape[1]
    if by_model:
        del batch["mm_token_type_ids"]
    view = BatchView(batch, placeholders=lambda: {"image": IMAGE})
    assert view.length == len(sizes)
    for start, stop in pairwise(sorted({0, len(sizes), data.draw(st.integers(0, len(sizes)))})):
        wanted = qwen(sizes[start:stop], first=start, width=width)
        assert same(view.piece(start, stop), {key: wanted[key] for key in batch})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any), st.integers(1, 4))
def test_pictures_with_the_same_number_of_tokens_are_counted_by_them(
    counts: list[int], tokens: int
) -> None:
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    batch = {
        "input_ids": texts([[tokens] * count for count in counts]),
        "pixel_values": torch.tensor(owners)[:, None, None, None].expand(-1, 3, 2, 2),
    }
    view = BatchView(batch, placeholders=lambda: {"image": IMAGE})
    for sample, count in enumerate(counts):
        pixels = view.piece(sample, sample + 1)["pixel_values"]
        if sum(counts) == len(counts) and all(counts):
            assert pixels.shape[0] == 1
        elif count:
            assert pixels[:, 0, 0, 0].tolist() == [sample] * count
        else:
            assert pixels is None


def test_a_video_goes_with_its_sample() -> None:
    ids = texts([[2], [], [4]], VIDEO)
    batch = {
        "input_ids": ids,
        "pixel_values_videos": torch.arange(24)[:, None],
        "video_grid_thw": torch.tensor([[2, 2, 2], [4, 2, 2]]),
        "second_per_grid_ts": [0.5, 1.0],
    }
    view = BatchView(batch, placeholders=lambda: {"image": IMAGE, "video": VIDEO})
    piece = view.piece(1, 3)
    assert piece["pixel_values_videos"][:, 0].tolist() == list(range(8, 24))
    assert piece["second_per_grid_ts"] == [1.0]
    assert view.piece(1, 2)["video_grid_thw"] is None


def test_numbers_in_the_batch_tell_first() -> None:
    batch = {
        "input_ids": torch.ones(3, 4).long(),
        "pixel_values": torch.arange(4)[:, None, None, None, None].expand(-1, 2, 3, 2, 2),
        "image_sizes": torch.full((4, 2), 8),
        "batch_num_images": torch.tensor([3, 0, 1]),
    }
    view = BatchView(batch)
    assert view.piece(0, 1)["pixel_values"][:, 0, 0, 0, 0].tolist() == [0, 1, 2]
    assert view.piece(1, 2)["image_sizes"] is None
    assert view.piece(2, 3)["batch_num_images"].tolist() == [1]


def test_one_for_each_picture_of_a_flat_list_is_no_number_of_each_sample() -> None:
    # LLaVA-OneVision's processor says this of images that were not given in a list for each text
    batch = {
        "input_ids": texts([[3], [], [3, 3]]),
        "pixel_values": torch.arange(3)[:, None, None, None, None].expand(-1, 2, 3, 2, 2),
        "image_sizes": torch.full((3, 2), 8),
        "batch_num_images": torch.tensor([1, 1, 1]),
    }
    view = BatchView(batch, placeholders=lambda: {"image": IMAGE})
    assert view.piece(2, 3)["pixel_values"][:, 0, 0, 0, 0].tolist() == [1, 2]


def test_rows_that_hold_all_pictures_of_a_sample_are_cut_by_samples() -> None:
    # Idefics pads them; a piece without a picture gets none, as from its processor
    batch = {
        "input_ids": texts([[2], [2, 2], []]),
        "pixel_values": torch.ones(3, 2, 3, 4, 4),
        "pixel_attention_mask": torch.ones(3, 2, 4, 4),
    }
    view = BatchView(batch, placeholders=lambda: {"image": IMAGE})
    assert view.piece(1, 3)["pixel_values"].shape == (2, 2, 3, 4, 4)
    assert view.piece(2, 3)["pixel_values"] is None
    assert view.piece(2, 3)["pixel_attention_mask"] is None
    assert BatchView(batch).piece(2, 3)["pixel_values"].shape == (1, 2, 3, 4, 4)


def test_pictures_that_nothing_gives_to_a_sample_are_refused_with_the_line_to_add() -> None:
    batch = qwen([[(2, 2), (2, 4)], [(4, 4)]])
    del batch["mm_token_type_ids"]
    with pytest.raises(BatchError) as raised:
        BatchView(batch)
    assert 'cut.ragged("pixel_values", lengths=' in str(raised.value)
    assert 'cut.ragged("image_grid_thw", lengths=' in str(raised.value)
    said = cut.ragged("pixel_values", lengths=lambda _: [12, 16]) | cut.ragged(
        "image_grid_thw", lengths=lambda _: [2, 1]
    )
    assert BatchView(batch, said).piece(1, 2)["image_grid_thw"].tolist() == [[1, 4, 4]]


@pytest.mark.parametrize(
    "change",
    [
        {"image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 2]])},
        {"mm_token_type_ids": torch.zeros(2, 8).int()},
    ],
)
def test_grids_that_contradict_the_rest_are_refused(change: dict[str, Tensor]) -> None:
    batch = qwen([[(2, 2), (2, 4)], [(4, 4)]])
    assert batch["input_ids"].shape == (2, 8)
    with pytest.raises(BatchError):
        BatchView(batch | change)


def cut_off(batch: dict[str, Any], width: int) -> dict[str, Any]:
    """Return a batch whose texts have `width` tokens at most, with all of their pictures."""
    texts = ("input_ids", "mm_token_type_ids")
    return batch | {key: batch[key][:, :width] for key in texts if key in batch}


def pixels(counts: list[int]) -> dict[str, Any]:
    """Return pictures of one size, of four tokens each."""
    ids = texts([[4] * count for count in counts])
    return {"input_ids": ids, "pixel_values": torch.zeros(sum(counts), 3, 2, 2)}


@pytest.mark.parametrize(
    "batch",
    [
        cut_off(qwen([[(2, 4)], [(2, 2), (2, 4)], [(2, 2)]]), 6),
        cut_off(pixels([1, 2, 1]), 11),
        cut_off(pixels([0, 2, 1]), 11),
        cut_off(pixels([1, 2, 0]), 11),
        cut_off(pixels([0, 2, 1]) | {"num_images": torch.tensor([0, 2, 1])}, 11),
    ],
)
def test_a_text_that_was_cut_off_within_a_picture_is_named_with_the_way_out(
    batch: dict[str, Any],
) -> None:
    assert batch["input_ids"][:, -1].tolist() == [0, IMAGE, 0]
    with pytest.raises(BatchError) as refused:
        BatchView(batch, placeholders=lambda: {"image": IMAGE})
    assert "texts that end with one: sample 1\n" in str(refused.value)
    assert "a longer max_length, or no truncation" in str(refused.value)


def test_of_one_picture_each_the_text_that_was_cut_off_is_named() -> None:
    batch = pixels([1, 1, 1])
    ids = batch["input_ids"].roll(1, 1)  # a question before the picture of one
    batch["input_ids"][2] = ids[2]
    view = BatchView(batch, placeholders=lambda: {"image": IMAGE})
    assert view.length == 3
    with pytest.raises(BatchError, match="texts that end with one: sample 2\n"):
        BatchView(cut_off(batch, 6), placeholders=lambda: {"image": IMAGE})


def test_texts_that_end_with_a_picture_are_not_called_cut_off() -> None:
    batch = cut_off(pixels([1, 1, 1]), 6)  # all tokens are there, and nothing after them
    assert batch["input_ids"][:, -1].tolist() == [IMAGE] * 3
    view = BatchView(batch, placeholders=lambda: {"image": IMAGE})
    assert view.piece(1, 3)["pixel_values"].shape == (2, 3, 2, 2)
    # pictures of different sizes have different numbers of tokens
    sized = cut_off(pixels([2, 1]) | {"image_sizes": torch.ones(3, 2)}, 11)
    with_sizes = sized | {"num_images": torch.tensor([2, 1])}
    view = BatchView(with_sizes, placeholders=lambda: {"image": IMAGE})
    assert view.piece(0, 1)["pixel_values"].shape == (2, 3, 2, 2)


def test_one_picture_each_needs_no_placeholders() -> None:
    batch = {"input_ids": torch.ones(3, 4).long(), "pixel_values": torch.zeros(3, 3, 2, 2)}
    assert BatchView(batch).piece(1, 3)["pixel_values"].shape == (2, 3, 2, 2)


def test_the_configuration_of_a_model_tells_its_placeholders() -> None:
    class Config:
        image_token_id = IMAGE

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)
            vars(self)["config"] = Config()

    model, batch = Model(), qwen([[(2, 2), (2, 4)], [], [(4, 4)]])
    del batch["mm_token_type_ids"]
    seen = []

    def loss_fn(piece: dict[str, Any]) -> Tensor:
        seen.append(None if piece["pixel_values"] is None else len(piece["pixel_values"]))
        pixels = piece["pixel_values"]
        pixels = torch.zeros(1, 1) if pixels is None else pixels
        loss: Tensor = model.inner(pixels).mean()
        return loss

    mbs = ElasticMBS(nn.ModuleList([model]), micro_batch_size=1)
    mbs.backward(loss_fn, batch)
    mbs.backward(loss_fn, batch)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] == [12, None, 16]
