"""Memory by size and length: α·T + β·T·L, whether β is nothing, everything, or not known yet."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_mbs import MemoryBudget
from elastic_mbs.controller.fit import KNOTS, MemoryFit
from tests.helpers.device_sim import Device, Job
from tests.helpers.steps import there


@dataclass(frozen=True)
class Need:
    """A peak as it really is."""

    base: int
    alpha: int
    beta: int

    def __call__(self, x: int, length: int) -> int:
        return self.base + x * (self.alpha + self.beta * length)


needs = st.builds(Need, st.integers(0, 10**7), st.integers(0, 10_000), st.integers(0, 100)).filter(
    lambda need: need.alpha + need.beta > 0
)
lengths = st.integers(16, 1000)


def measured(need: Need, pieces: list[tuple[int, int]]) -> MemoryFit:
    """Return the fit to pieces of (samples, length)."""
    fit = MemoryFit()
    fit.hold(need.base)
    for samples, length in pieces:
        fit.add(samples * length, need(samples * length, length), elements=length)
    return fit


@settings(deadline=None, max_examples=200)
@given(needs, lengths, st.integers(4, 12), st.integers(1, 8), st.integers(1, 1000))
def test_two_sizes_at_two_lengths_tell_the_memory_of_every_length(
    need: Need, length: int, longer: int, samples: int, asked: int
) -> None:
    other = length * (longer + 2) // 4
    pieces = [*product((samples, 2 * samples), (length, other))]
    fit = measured(need, [(n, at) for n, at in pieces])
    # the intercept alone is fitted to less than every digit where all else is small beside it
    assume(need(samples * length, length) > 1.5 * need.base)
    curve = fit.at(asked)
    for x in range(1, 20 * asked, max(1, asked)):
        predicted = curve.predict(x)
        if predicted is not None:
            assert predicted == pytest.approx(need(x, asked), rel=1e-3)


@settings(deadline=None, max_examples=200)
@given(needs, lengths, lengths, st.integers(1, 8), st.integers(1, 8))
def test_with_one_length_seen_no_prediction_for_another_is_too_low(
    need: Need, seen: int, asked: int, samples: int, few: int
) -> None:
    curve = measured(need, [(samples, seen), (2 * samples, seen)]).at(asked)
    predicted = curve.predict(few * asked)
    if predicted is not None:
        assert predicted >= need(few * asked, asked) * (1 - 1e-9)


@settings(deadline=None, max_examples=100)
@given(needs, st.lists(lengths, min_size=2, max_size=9, unique=True), st.integers(1, 8))
def test_where_size_and_length_rise_together_the_higher_prediction_counts(
    need: Need, seen: list[int], samples: int
) -> None:
    # a whole batch of so many samples in each call: α and β cannot be told apart
    fit = measured(need, [(samples, length) for length in seen])
    length = max(seen)
    for few in range(1, samples):
        assert there(fit.at(length).predict(few * length)) >= need(few * length, length) * (
            1 - 0.02
        )


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), needs)
def test_memory_of_a_fit_is_bounded_with_any_number_of_lengths(seed: int, need: Need) -> None:
    rng, fit = random.Random(seed), MemoryFit()
    pieces = [(rng.randint(1, 64), rng.randint(16, 512)) for _ in range(2 * KNOTS)]
    for samples, length in pieces:
        fit.add(samples * length, need(samples * length, length), elements=length)
    assert len(fit.state()) <= KNOTS
    again = MemoryFit.restored(fit.state())
    for samples, length in pieces:
        assert fit.covers(samples * length, length) or fit.is_new(samples * length, length)
        assert again.at(length).predict(samples * length) == fit.at(length).predict(
            samples * length
        )


# -------------------------------------------------------------- against memory that is counted


class Block(nn.Module):
    """A block whose attention keeps its weights, L² of them for each head and sample."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


def counted(model: GPT, samples: int, length: int) -> tuple[int, int]:
    """Return the bytes held as a step begins, and the most that it holds."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with MemoryBudget("8GiB") as budget:
        tokens = torch.zeros(samples, length, dtype=torch.long)
        held = budget.live
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        return held, budget.peak


SIZES, LENGTHS = (2, 3, 6, 8), (64, 96, 128, 192, 256)


@pytest.mark.parametrize("vocabulary", [1000, 2000])
def test_the_peak_of_a_gpt_with_eager_attention_is_predicted_to_two_percent(
    vocabulary: int,
) -> None:
    model, fit = GPT(vocabulary), MemoryFit()
    real = {(n, length): counted(model, n, length) for n, length in product(SIZES, LENGTHS)}
    for n, length in product((2, 8), (64, 192)):
        held, peak = real[n, length]
        fit.hold(held)
        fit.add(n * length, peak, elements=length)
    errors = {}
    for (n, length), (held, peak) in real.items():
        fit.hold(held)
        predicted = there(fit.at(length).predict(n * length))
        errors[n, length] = (predicted - peak) / (peak - held)
    assert max(map(abs, errors.values())) <= 0.02, errors


# --------------------------------------------------------------------- fewer failures follow


def growing(call: int, rng: random.Random) -> int:
    """Return the length of completions that grow as a model learns, from 64 to 512."""
    return int((64 + 448 * call / 300) * rng.uniform(0.9, 1))


def long_tail(call: int, rng: random.Random) -> int:
    return min(512, int(64 * (1 + rng.expovariate(1))))


@pytest.mark.parametrize(
    ("lengths_of", "alpha", "beta", "most"),
    [
        # failures in eight runs; with the length left out of the model they were 60, 58, 35, 24
        (growing, 1000, 8, 24),
        (growing, 0, 12, 24),
        (long_tail, 1000, 8, 24),
        (long_tail, 0, 12, 20),
    ],
)
def test_batches_of_varying_length_run_out_of_memory_less_often(
    lengths_of: Callable[[int, random.Random], int], alpha: int, beta: int, most: int
) -> None:
    failures = 0
    for seed in range(8):
        rng, need = random.Random(seed), Need(10**6, alpha, beta)
        total = need(32 * 512, 512) * 15 // 100
        job = Job(Device(total), lambda x: x, need_at=need, seed=seed)
        job.per_sample, job.per_piece = 0.004, 0.01
        for call in range(300):
            job.call(32, lengths_of(call, rng))
        failures += job.ooms
    assert failures <= most
