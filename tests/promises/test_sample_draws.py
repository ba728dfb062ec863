"""`GradientOptions(draws="sample")`: noise and dropout do not depend on the split."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elastic_mbs import GradientOptions, UsageError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import elastic
from tests.helpers.strikes import until_clean

SAMPLES = 12


class VAE(nn.Module):
    """A variational autoencoder with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_std = self.encoder(self.drop(x)).chunk(2, 1)
        z = mean + torch.randn_like(mean) * log_std.exp()
        found: Tensor = (self.decoder(z) - x).pow(2).mean() + (mean**2 + log_std.exp()).mean()
        return found


class Diffusion(nn.Module):
    """A denoiser: a time and a noise for each sample, and attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        time = torch.randint(0, 10, (len(x),))
        noise = torch.randn(x.shape, dtype=x.dtype)
        mixed = x + noise * (time / 10)[:, None]
        pairs = mixed.reshape(len(x), 2, 3).repeat(1, 1, 2)
        found: Tensor = self.inner(pairs).pow(3).mean()
        return found


class Checkpointed(VAE):
    """The same, with its forward run again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


def many(x: Tensor, weight: Tensor) -> Tensor:
    """Return a loss that draws in every supported way."""
    n = len(x)
    drawn = [
        torch.rand(n, 6),
        torch.rand_like(x),
        torch.randint(-3, 4, (n, 6)),
        torch.randint_like(x, 5),
        torch.randint_like(x, 2, 5),
        torch.normal(x, 0.5),
        torch.normal(0.0, x.abs()),
        torch.normal(x, x.abs()),
        torch.normal(1.0, 2.0, (n, 6)),
        torch.bernoulli(x.sigmoid()),
        torch.bernoulli(x, 0.4),
        torch.empty(n, 6).bernoulli_(torch.tensor([0.1, 0.5, 0.9, 0.2, 0.4, 0.6])),
        torch.empty(n, 6).exponential_(),
        torch.empty(n, 6).uniform_(-1, 2),
        torch.empty(n, 6).random_(3, 9),
        torch.empty(n, 6).random_(7),
        torch.multinomial(x.sigmoid(), 6, replacement=True),
        torch.multinomial(torch.ones(10), n, replacement=True)[:, None].expand(n, 6),
        torch.empty(6, n).t().normal_(),  # laid out otherwise
        functional.dropout(x, 0.5),
        torch.native_dropout(x, 0.5, True)[0],
        functional.gumbel_softmax(x),
        functional.scaled_dot_product_attention(
            x[:, None, :, None], x[:, None, :, None], x[:, None, :, None], dropout_p=0.5
        ).flatten(1),
    ]
    return (torch.stack([each.double() for each in drawn]).sum(0) @ weight).pow(2).mean()


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return many(x, self.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vae": VAE,
    "diffusion": Diffusion,
    "checkpointed": Checkpointed,
    "every draw": Many,
}


def run(kind: str, size: int, inject: Any = None, steps: int = 1) -> Any:
    """Return the gradients and losses of a few calls, and the stream after them."""
    torch.manual_seed(1)
    model = MODELS[kind]().double()
    x = torch.randn(SAMPLES, 6, dtype=torch.float64)
    mbs = elastic(model, micro_batch_size=size, gradients=GradientOptions(draws="sample"))
    losses = []
    for _ in range(steps):
        if inject is None:
            losses.append(float(mbs.backward(model, x)))
        else:
            with inject:
                losses.append(float(mbs.backward(model, x)))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return grads, losses, torch.rand(3)


def check(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_every_split_has_the_same_noise(kind: str) -> None:
    wanted = run(kind, SAMPLES, steps=3)
    for size in (1, 2, 5, 7):
        check(run(kind, size, steps=3), wanted)
    assert len({f"{loss:.6f}" for loss in wanted[1]}) == 3  # new noise in each call


@pytest.mark.parametrize("kind", MODELS)
def test_out_of_memory_anywhere_leaves_the_noise(kind: str) -> None:
    wanted = run(kind, SAMPLES)
    points = 0
    for inject in until_clean(lambda at: InjectOOM(at=[at]), stride=7):
        check(run(kind, SAMPLES, inject), wanted)
        points += bool(inject.hits)
    assert points > 3


def test_samples_have_different_numbers_that_are_spread_as_they_should() -> None:
    model = nn.Linear(1, 1)

    def step(x: Tensor) -> Any:
        noise = torch.randn(len(x), 50)
        return model(x).mean(), noise

    mbs = elastic(model, micro_batch_size=7, gradients=GradientOptions(draws="sample"))
    noise = torch.stack([mbs.backward(step, torch.ones(400, 1)).outputs for _ in range(2)])
    assert len(noise.flatten().unique()) > 39_900
    assert abs(float(noise.mean())) < 0.03
    assert abs(float(noise.std()) - 1) < 0.03
    rows = noise.reshape(800, 50)
    correlation = torch.corrcoef(rows) - torch.eye(800)
    assert float(correlation.abs().max()) < 0.75  # 320,000 pairs of 50 numbers


def split(loss: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=2, gradients=GradientOptions(draws="sample"))
    mbs.backward(lambda x: model(x).mean() + loss(x), torch.ones(4, 2))


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda x: torch.rand(3).sum(), r"shape \(3,\) were drawn for 2 samples"),
        (lambda x: torch.rand(()), r"shape \(\) were drawn"),
        (lambda x: torch.randperm(len(x)).sum(), "cannot draw aten.randperm"),
        (lambda x: torch.multinomial(torch.ones(9), len(x)).sum(), "without replacement"),
        (lambda x: functional.rrelu(x, training=True).sum(), "cannot draw aten.rrelu"),
        (
            lambda x: torch.rand(len(x), generator=torch.Generator()).sum(),
            "cannot draw aten.rand",
        ),
        (lambda x: x.sum() * random.random(), "from Python's random or from numpy"),
    ],
)
def test_numbers_that_do_not_belong_to_samples_are_refused(
    loss: Callable[[Tensor], Tensor], match: str
) -> None:
    model, before = nn.Linear(2, 1), torch.get_rng_state()
    with pytest.raises(UsageError, match=match):
        split(loss, model)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_on_the_host_are_refused_in_the_first_call_however_it_is_split() -> None:
    model = nn.Linear(2, 1)
    mbs = elastic(model, micro_batch_size=4, gradients=GradientOptions(draws="sample"))
    with pytest.raises(UsageError, match="from Python's random or from numpy"):
        mbs.backward(lambda x: model(x).mean() * random.random(), torch.ones(4, 2))
    assert model.weight.grad is None


def test_attention_without_dropout_draws_nothing() -> None:
    split(
        lambda x: functional.scaled_dot_product_attention(
            x[:, None], x[:, None], x[:, None]
        ).mean(),
        nn.Linear(2, 1),
    )


def test_a_loss_over_embeddings_draws_the_same_for_every_split() -> None:
    def gradient(size: int, *at: int) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(0)
        model, drop = nn.Linear(6, 4).double(), nn.Dropout(0.3)
        x = torch.randn(SAMPLES, 6, dtype=torch.float64)
        mbs = elastic(model, micro_batch_size=size, gradients=GradientOptions(draws="sample"))

        def loss_fn(z: Tensor) -> Tensor:
            noisy = z + torch.randn_like(z)  # in the loss itself, which sees the whole batch
            return (noisy @ noisy.T).logsumexp(1).mean()

        with InjectOOM(at=at):
            mbs.backward_embeddings(lambda piece: drop(model(piece)), loss_fn, x)
        return [p.grad.clone() for p in model.parameters()], torch.get_rng_state()  # type: ignore[union-attr]

    whole, streams = gradient(SAMPLES)
    for size, *at in [(4,), (1,), (SAMPLES, 9), (5, 30)]:
        found, after = gradient(size, *at)
        assert all(map(torch.allclose, found, whole)), (size, at)
        assert torch.equal(after, streams), (size, at)
