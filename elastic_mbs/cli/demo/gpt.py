"""A small GPT.

It has pre-norm blocks, causal attention by scaled_dot_product_attention, and an output layer that
is tied to the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_mbs.cli.demo.text import IGNORED, Batch


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model.

    There is no dropout: masks depend on the split, and runs with different splits could not be
    compared.
    """

    vocabulary: int = 256  # bytes are their own tokens
    context: int = 255  # longest sequence
    width: int = 64
    heads: int = 4
    layers: int = 4


class Block(nn.Module):
    """Attention and a feed-forward layer, each on a normalised input and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, width) to the same shape."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.up(self.feed_forward_norm(x)))
        out: Tensor = x + self.down(hidden)
        return out


class GPT(nn.Module):
    """Tokens → logits of the next one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for weight in (self.embedding.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (samples, length) to logits (samples, length, vocabulary)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def token_loss(batch: Batch, model: nn.Module) -> Tensor:
    """Return the cross-entropy, a mean over the tokens that are not padding."""
    logits: Tensor = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def make_model(config: GPTConfig, *, seed: int, dtype: torch.dtype) -> GPT:
    """Return a model whose weights depend on the seed alone.

    torch's own random stream does not move.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(config)
    return model.to(dtype)
