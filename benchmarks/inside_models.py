"""Models whose one sample is to train in a part of its memory: of transformers, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, LENGTH, WIDTH = 8000, 512, 32


class Subject(NamedTuple):
    """A model, one sample, and the loss of a batch."""

    model: nn.Module
    sample: Tensor
    loss_of: Callable[[Tensor], Tensor]


# ---------------------------------------------------------------------- of transformers

_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 8 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
# name: its class, and options
LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Mistral": ("Mistral", {}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 8}),
    "Gemma2, capped": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 20.0}),
    "Gemma3": ("Gemma3", {"head_dim": 8}),
    "GPT2, tied": (
        "GPT2",
        {"n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, **_NO_DROPOUT},
    ),
    "GPTNeoX": ("GPTNeoX", {}),
    "Cohere, scaled": ("Cohere", {"logit_scale": 0.25}),
    "OLMo2": ("Olmo2", {}),
    "Phi3": ("Phi3", {}),
    "StableLM": ("StableLm", {}),
    "Granite": ("Granite", {}),
    "OPT": ("OPT", {"ffn_dim": 8 * WIDTH, "word_embed_proj_dim": WIDTH, "dropout": 0.0}),
    "Mixtral, experts": ("Mixtral", _EXPERTS),
    "Qwen3 MoE, experts": (
        "Qwen3Moe",
        {**_EXPERTS, "head_dim": 8, "moe_intermediate_size": 4 * WIDTH},
    ),
}


def language(name: str) -> Subject:
    """Return a language model of transformers in a tiny configuration."""
    import transformers

    kind, options = LANGUAGE[name]
    sizes = {"vocab_size": WORDS} if kind == "GPT2" else _SIZES
    config_of = getattr(transformers, f"{kind}TextConfig", None)
    config = (config_of or getattr(transformers, f"{kind}Config"))(**{**sizes, **options})
    torch.manual_seed(0)
    found = getattr(transformers, f"{kind}LMHeadModel", None)
    model = (found or getattr(transformers, f"{kind}ForCausalLM"))(config)
    if "experts" in name:  # the fused ones know no double precision
        model.set_experts_implementation("eager")
    ids = torch.randint(1, WORDS, (1, LENGTH))

    def loss_of(batch: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    return Subject(model.double().train(), ids, loss_of)


# ---------------------------------------------------------------------- by hand


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width)
        )
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (samples, positions, width) after attention and MLP."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        added: Tensor = x + self.mlp(self.between(x))
        return added


class GPT(nn.Module):
    """A language model of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, causal=True) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape (samples, positions, words)."""
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Recurrent(nn.Module):
    """A language model of LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape (samples, positions, words)."""
        logits: Tensor = self.head(self.layers(self.words(ids))[0])
        return logits


class Vision(nn.Module):
    """A transformer of patches of a picture of shape (samples, 3, 128, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(Block(WIDTH, causal=False) for _ in range(6))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (samples, 10)."""
        x = self.patches(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


class Double(nn.Sequential):
    """Two convolutions, each with a norm."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(
            nn.Conv2d(one, other, 3, padding=1),
            nn.GroupNorm(4, other),
            nn.SiLU(),
            nn.Conv2d(other, other, 3, padding=1),
            nn.GroupNorm(4, other),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """A U-Net over pictures of shape (samples, 3, 128, 128).

    Args:
        transposed: a transposed convolution of half as many channels leads a level up, as in the
            first U-Net (Ronneberger et al., 2015). Otherwise pictures are enlarged as they are.
    """

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList([Double(3, 16), Double(16, 32), Double(32, 64)])
        if transposed:
            larger = [nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)]
            self.larger = nn.ModuleList(larger)
            self.up = nn.ModuleList([Double(64, 32), Double(32, 16)])
        else:
            self.larger = nn.ModuleList(nn.Upsample(scale_factor=2) for _ in range(2))
            self.up = nn.ModuleList([Double(96, 32), Double(48, 16)])
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a picture of the same shape."""
        kept = list[Tensor]()
        for layer in self.down:
            x = layer(functional.avg_pool2d(x, 2) if kept else x)
            kept.append(x)
        for larger, layer, beside in zip(self.larger, self.up, reversed(kept[:-1]), strict=True):
            x = layer(torch.cat([larger(x), beside], 1))
        found: Tensor = self.head(x)
        return found


class Residual(nn.Module):
    """An MLP that is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one, self.two = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (…, width) after the MLP."""
        found: Tensor = x + self.two(functional.silu(self.one(self.norm(x))))
        return found


class Diffusion(nn.Sequential):
    """The noise of points of shape (samples, points, 3), by an MLP."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, WIDTH), *(Residual() for _ in range(8)), nn.Linear(WIDTH, 3))


def _next_word(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss_of(ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return loss_of


def _words() -> Tensor:
    return torch.randint(0, WORDS, (1, LENGTH))


def _picture() -> Tensor:
    return torch.randn(1, 3, 128, 128, dtype=torch.float64)


def _squared(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda batch: (model(batch) - 1.0).square().mean()


BY_HAND: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Any]] = {
    "GPT by hand": (GPT, _words, _next_word),
    "LSTM language model": (Recurrent, _words, _next_word),
    "ViT": (Vision, _picture, _squared),
    "U-Net": (partial(UNet, transposed=True), _picture, _squared),
    "U-Net, enlarging": (partial(UNet, transposed=False), _picture, _squared),
    "diffusion MLP": (
        Diffusion,
        lambda: torch.randn(1, 4096, 3, dtype=torch.float64),
        _squared,
    ),
}


def by_hand(name: str) -> Subject:
    """Return a model of one's own."""
    make, sample, loss = BY_HAND[name]
    torch.manual_seed(0)
    model = make().double()
    return Subject(model, sample(), loss(model))


def subject(name: str) -> Subject:
    """Return the model of that name, in double precision."""
    return language(name) if name in LANGUAGE else by_hand(name)
