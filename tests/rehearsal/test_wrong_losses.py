"""`verify` names what is wrong with a loss, and following what it says makes the loss exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import VerifyReport, count_tokens
from tests.helpers.right_losses import vae
from tests.helpers.steps import Pair, cross_entropy, elastic, mlp, off_by, pairs, whole_gradient

LossFn = Callable[..., Any]


def says(report: VerifyReport, *words: str) -> bool:
    return any(all(word in finding for word in words) for finding in report.findings)


def wrong(model: nn.Module, loss_fn: LossFn, batch: Any, **options: Any) -> str:
    """Return the findings of a loss that has to be called wrong, on two samples and on six."""
    for samples in (2, 6):
        report = elastic(model, **options).verify(loss_fn, batch, samples=samples)
        assert not report.ok
        assert report.compared
    return " ".join(report.findings)


def right(
    model: nn.Module, make: Callable[[nn.Module], LossFn], batch: Any, **options: Any
) -> None:
    """Check that a loss is found right, and that pieces of it have the whole gradient."""
    model.zero_grad()
    mbs = elastic(model, micro_batch_size=2, **options)
    report = mbs.verify(make(model), batch)
    assert report.ok, report
    assert report.compared
    mbs.backward(make(model), batch)
    assert off_by(model, whole_gradient(model, lambda twin: make(twin)(batch))) <= 1e-12


# ---------------------------------------------------------------------- state


class Centred(nn.Module):
    """DINO's loss: it reads a centre, and moves it."""

    center: Tensor

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4, dtype=torch.float64))
        self.moves = moves

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        wanted = torch.softmax((teacher - self.center) / 0.04, -1).detach()
        if self.moves:
            self.move(teacher)
        return -(wanted * torch.log_softmax(student / 0.1, -1)).sum(-1).mean()

    def move(self, teacher: Tensor) -> None:
        self.center = 0.9 * self.center + 0.1 * teacher.detach().mean(0)


def dino(*, moves: bool) -> nn.ModuleDict:
    parts = {"student": mlp(seed=0), "teacher": mlp(seed=1).requires_grad_(False)}
    return nn.ModuleDict({**parts, "loss": Centred(moves=moves)})


def dino_loss(model: Any) -> LossFn:
    def loss_fn(b: Pair) -> tuple[Tensor, Tensor]:
        teacher = model["teacher"](b[0])
        return model["loss"](model["student"](b[0]), teacher), teacher

    return loss_fn


def test_a_statistic_that_the_loss_moves_is_named_with_its_way_out() -> None:
    stranger = nn.Linear(6, 6).double()
    found = wrong(stranger, dino_loss(dino(moves=True)), pairs())
    assert "reads the buffer Centred.center" in found  # of a model that nobody gave
    model = dino(moves=True)
    found = wrong(model, dino_loss(model), pairs())
    assert "reads the buffer Centred.center, which it also changes" in found
    assert "return what changes it as an output, and change it once, after the call" in found
    model, twin = dino(moves=False), dino(moves=True)
    right(model, lambda each: lambda b: dino_loss(each)(b)[0], pairs())
    result = elastic(model, micro_batch_size=2).backward(dino_loss(model), pairs())
    centre: Any = model["loss"]
    centre.move(result.outputs)
    dino_loss(twin)(pairs())
    other: Any = twin["loss"]
    assert torch.allclose(centre.center, other.center, rtol=1e-12)


class Guarded(nn.Module):
    """A centre that moves in training alone; with BatchNorm and dropout, which are no finding."""

    centre: Tensor

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(mlp(), nn.BatchNorm1d(4), nn.Dropout(0.3)).double()
        self.register_buffer("centre", torch.zeros(4, dtype=torch.float64))
        self.reads = reads

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        out = y - self.centre if self.reads else y
        if self.training:
            self.centre.mul_(0.5).add_(y.detach().mean(0), alpha=0.5)
        return out


@pytest.mark.parametrize("given", [True, False])
def test_a_statistic_that_moves_in_training_alone_is_named(given: bool) -> None:
    model = Guarded(reads=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = wrong(model if given else mlp(), cross_entropy(model), pairs())
    assert "reads the buffer Guarded.centre, which it also changes in training" in found
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    model.eval()
    assert elastic(model).verify(cross_entropy(model), pairs()).ok


@pytest.mark.parametrize("hook", [True, False])
def test_state_that_moves_and_is_not_read_is_no_finding(hook: bool) -> None:
    parametrized: Any = nn.utils.parametrizations.spectral_norm
    spectral = nn.utils.spectral_norm if hook else parametrized
    model = nn.Sequential(spectral(nn.Linear(6, 6)), Guarded(reads=False)).double()
    report = elastic(model).verify(cross_entropy(model), pairs())
    assert report.ok, report
    assert report.compared


class Annealed(nn.Module):
    """A module that adds less each time that it runs, by a number or by a tensor of its own."""

    def __init__(self, *, tensor: bool) -> None:
        super().__init__()
        self.inner, self.runs = mlp(), 0
        self.share = torch.ones(1, dtype=torch.float64) if tensor else None

    def forward(self, x: Tensor) -> Any:
        self.runs += self.share is None
        if self.share is not None:
            self.share *= 0.5
            return self.inner(x) * self.share
        return self.inner(x) / self.runs


@pytest.mark.parametrize("tensor", [False, True])
def test_a_state_that_is_no_buffer_is_named_too(tensor: bool) -> None:
    model = Annealed(tensor=tensor)
    what = "a tensor of shape (1,)" if tensor else "a number that a module keeps"
    found = wrong(model, cross_entropy(model), pairs())
    assert f"reads {what}, which it also changes" in found
    assert model.runs == 0
    assert model.share is None or model.share.item() == 1.0


def test_a_state_outside_of_buffers_is_told() -> None:
    model, calls = mlp(), [0]

    def loss_fn(b: Pair) -> Any:
        calls[0] += 1
        return cross_entropy(model)(b) * calls[0]

    assert "keeps a state outside of buffers (a counter" in wrong(model, loss_fn, pairs())


# ---------------------------------------------------------------------- counts


def translation(pad: int, *, shift: bool = False) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    target = torch.randint(2, 11, (8, 5))
    for row, keep in enumerate((5, 5, 2, 4, 3, 2, 2, 5)):  # the first two have no padding
        target[row, keep:] = pad
    batch = {"source": torch.randint(2, 11, (8, 5)), "out": {"target": target}}

    def make(each: nn.Module) -> LossFn:
        def loss_fn(b: Any) -> Any:
            logits, y = each(b["source"]), b["out"]["target"]
            logits, y = (logits[:, :-1], y[:, 1:]) if shift else (logits, y)
            loss: Tensor = functional.cross_entropy(
                logits.flatten(0, 1), y.flatten(), ignore_index=pad
            )
            return loss

        return loss_fn

    return model, make, batch


@pytest.mark.parametrize("pad", [0, 1, -1, -100])
@pytest.mark.parametrize("shift", [False, True])
def test_padding_of_any_value_is_found_and_its_count_is_exact(pad: int, shift: bool) -> None:
    model, make, batch = translation(pad, shift=shift)
    found = wrong(model, make(model), batch)
    index = "" if pad == -100 else f", ignore_index={pad}"
    shifted = ", shift=True" if shift else ""
    assert f"count=count_tokens('out.target'{index}{shifted})" in found
    count = count_tokens("out.target", ignore_index=pad, shift=shift)
    right(model, make, batch, count=count)


def test_a_mean_over_a_mask_of_the_batch_is_found_and_its_count_is_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    mask = torch.arange(5) < torch.tensor([5, 5, 2, 4, 3, 2, 2, 5])[:, None]
    batch = torch.randn(8, 5, 6).double(), mask.double()

    def make(each: nn.Module) -> LossFn:
        return lambda b: (each(b[0]).square().mean(2) * b[1]).sum() / b[1].sum()

    assert "give count=count_tokens(1, ignore_index=0)" in wrong(model, make(model), batch)
    right(model, make, batch, count=count_tokens(1, ignore_index=0))


@pytest.mark.parametrize("place", ["b", "b[1]"])
def test_a_mean_over_the_boxes_of_pictures_is_found_and_its_count_is_exact(place: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    pictures = torch.randn(8, 6).double()
    targets = [{"boxes": torch.rand(n, 4).double()} for n in (1, 2, 3, 4, 2, 1, 5, 2)]
    for picture, target in zip(pictures, targets, strict=True):
        target["picture"] = picture
    batch: Any = targets if place == "b" else (pictures, targets)

    def make(each: nn.Module) -> LossFn:
        def loss_fn(b: Any) -> Any:
            found = b if place == "b" else b[1]
            sums = [(each(d["picture"]) - d["boxes"]).abs().sum() for d in found]
            return torch.stack(sums).sum() / sum(len(d["boxes"]) for d in found)

        return loss_fn

    found = wrong(model, make(model), batch)
    assert f"give count=lambda b: [len(d['boxes']) for d in {place}]" in found
    advised = eval(f"lambda b: [len(d['boxes']) for d in {place}]")
    right(model, make, batch, count=advised)


WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 0.5]).double()


def test_class_weights_are_found_and_their_count_is_exact() -> None:
    def make(each: nn.Module) -> LossFn:
        return lambda b: functional.cross_entropy(each(b["x"]), b["y"], weight=w)

    model, w = mlp(), WEIGHTS
    batch = dict(zip("xy", pairs(), strict=True))
    found = wrong(model, make(model), batch)
    assert "weighted by class: give count=lambda b: w[b['y']], with w its weight=" in found
    right(model, make, batch, count=lambda b: w[b["y"]])


@pytest.mark.parametrize("ignored", [-100, 3])
def test_class_weights_over_pixels_are_found_and_their_count_is_exact(ignored: int) -> None:
    torch.manual_seed(0)
    model, w = nn.Conv2d(1, 4, 1).double(), WEIGHTS
    y = torch.randint(0, 3, (8, 5, 5))
    y[::2, 2:] = ignored
    batch = torch.randn(8, 1, 5, 5).double(), y
    criterion = nn.NLLLoss(weight=w, ignore_index=ignored)

    def make(each: nn.Module) -> LossFn:
        return lambda b: criterion(each(b[0]).log_softmax(1), b[1])

    place = "b[1]" if ignored >= 0 else "b[1].clamp(min=0)"
    advised = f"torch.where(b[1] == {ignored}, 0, w[{place}]).flatten(1).sum(1)"
    assert f"give count=lambda b: {advised}, with w" in wrong(model, make(model), batch)
    right(model, make, batch, count=eval(f"lambda b: {advised}", {"torch": torch, "w": w}))


def test_a_count_that_is_given_for_a_mean_over_samples_is_told() -> None:
    model = mlp()
    found = wrong(model, cross_entropy(model), pairs(), count=lambda b: b[1] + 1)
    assert "is a mean over samples, and count= counts something else: leave count= out" in found
    right(model, cross_entropy, pairs())


def test_a_count_of_nothing_for_a_sample_with_a_loss_is_named() -> None:
    model, (x, y) = mlp(), pairs()

    def loss_fn(b: Any) -> Any:
        each = functional.cross_entropy(model(b[0]), b[1], reduction="none")
        return (each * b[2]).sum() / b[2].sum()

    batch = x, y, torch.linspace(0.1, 1.0, 8).double()
    found = wrong(model, loss_fn, batch, count=lambda b: (b[2] > 0.5).long())
    assert "count= says that it has no terms there" in found
    count = lambda b: b[2]  # noqa: E731  # as the finding has it: what the loss is a mean over
    assert elastic(model, count=count).verify(loss_fn, batch).ok


def test_a_sum_whose_samples_count_nothing_has_no_part_that_is_not_theirs() -> None:
    model, batch = mlp(), pairs()

    def loss_fn(b: Pair) -> Any:
        return cross_entropy(model)(b) * len(b[0])

    report = elastic(model, reduction="sum", count=lambda b: (b[1] > 0).long()).verify(
        loss_fn, batch
    )
    assert report.ok, report


# ---------------------------------------------------------------------- samples and their place


def dice(model: nn.Module) -> LossFn:
    def loss_fn(b: Pair) -> Any:
        p, t = model(b[0]).softmax(1), functional.one_hot(b[1], 4)
        return 1 - (2 * (p * t).sum(0) / (p.sum(0) + t.sum(0))).mean()

    return loss_fn


def f1(model: nn.Module) -> LossFn:
    def loss_fn(b: Pair) -> Any:
        p, t = model(b[0]).sigmoid()[:, 0], (b[1] > 1).double()
        hits = (p * t).sum()
        return 1 - 2 * hits / (2 * hits + (p * (1 - t)).sum() + ((1 - p) * t).sum())

    return loss_fn


@pytest.mark.parametrize("make", [dice, f1])
def test_a_score_over_the_batch_is_found_and_is_exact_over_embeddings(make: Any) -> None:
    model = mlp()
    assert "Dice, F1 or IoU over the batch" in wrong(model, make(model), pairs())
    identity = nn.Identity()
    mbs = elastic(model, micro_batch_size=2)
    mbs.backward_embeddings(lambda b: (model(b[0]), b[1]), make(identity), pairs())
    assert off_by(model, whole_gradient(model, lambda twin: make(twin)(pairs()))) <= 1e-12


def time_first(model: nn.Module) -> LossFn:
    return lambda b: functional.cross_entropy(model(b[0])[0].flatten(0, 1), b[1].flatten())


def test_a_batch_that_is_cut_along_time_is_named_with_its_dims() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(5, 4).double()
    batch = torch.randn(6, 8, 5).double(), torch.randint(0, 4, (6, 8))
    found = wrong(model, time_first(model), batch)
    assert "is cut along time: LSTM has batch_first=False" in found
    assert "say dims={'0': 1, '1': 1}" in found
    right(model, time_first, batch, dims={"0": 1, "1": 1})
    first = tuple(each.transpose(0, 1) for each in batch)
    right(
        model,
        lambda each: lambda b: time_first(each)(tuple(part.transpose(0, 1) for part in b)),
        first,
    )


def test_a_sum_with_random_draws_is_told_from_a_mean() -> None:
    torch.manual_seed(0)
    case = vae("sum")
    report = elastic(case.model).verify(case.loss_fn, case.batch)
    assert says(report, "is a sum over the samples", "use reduction='sum'")


def simclr(model: nn.Module) -> LossFn:
    def loss_fn(b: Pair) -> Any:
        views = [model(b[0] + 0.3 * torch.randn_like(b[0])) for _ in range(2)]
        one, other = (functional.normalize(each, dim=1) for each in views)
        return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))

    return loss_fn


def advantages(model: nn.Module) -> LossFn:
    def loss_fn(b: Pair) -> Any:
        reward = b[0][:, 0]
        reward = (reward - reward.mean()) / (reward.std() + 1e-8)
        return (reward * model(b[0] + 0.3 * torch.randn_like(b[0])).sum(1)).mean()

    return loss_fn


def simcse(model: nn.Module) -> LossFn:
    def loss_fn(b: Pair) -> Any:
        a = functional.dropout(functional.normalize(model(b[0]), dim=1), 0.1, training=True)
        return functional.cross_entropy(a @ a.T / 0.1, torch.arange(len(a)))

    return loss_fn


@pytest.mark.filterwarnings("error:std")
@pytest.mark.parametrize("make", [simclr, advantages, simcse])
def test_a_loss_that_compares_samples_is_found_under_its_noise(make: Any) -> None:
    model = mlp()
    assert "it compares samples with each other" in wrong(model, make(model), pairs())


def test_draws_that_go_to_another_sample_are_no_finding_against_a_loss() -> None:
    model = mlp()

    def loss_fn(b: Pair) -> Any:
        x = b[0][b[0][:, 0].argsort()]  # by length, say: a sample's draw depends on the others
        return (model(x) + torch.randn(len(x), 1).double()).square().mean()

    report = elastic(model).verify(loss_fn, pairs())
    assert report.ok
    assert not report.compared


def test_equal_draws_have_equal_figures() -> None:
    case = vae()
    report = elastic(case.model).verify(case.loss_fn, case.batch)
    assert report.ok
    assert abs(report.whole - report.split) <= 1e-12 * abs(report.whole)


def test_draws_that_cannot_be_equal_are_no_finding_against_a_loss() -> None:
    model = mlp()

    def loss_fn(b: Pair) -> Any:
        order = torch.randperm(len(b[0]))
        return (model(b[0]) * model(b[0])[order]).mean()

    report = elastic(model).verify(loss_fn, pairs())
    assert report.ok
    assert not report.compared
    assert str(report).startswith("not compared\n")
    assert says(report, "draws random numbers")
