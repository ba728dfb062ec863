"""Models of `benchmarks.partial_replay`: small, on a CPU, with a full-batch step of a few ms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
CLASSES = 10


@dataclass(frozen=True)
class Subject:
    """A model with its loss and one batch.

    Attributes:
        model: in training mode.
        loss_fn: piece → mean loss over its samples.
        batch: dictionary of tensors, samples first.
    """

    model: nn.Module
    loss_fn: Callable[[Any], Tensor]
    batch: dict[str, Tensor]

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        return len(next(iter(self.batch.values())))


def _of_transformers(model: Any, batch: dict[str, Tensor]) -> Subject:
    def loss_fn(piece: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**piece).loss
        return loss

    return Subject(model.train(), loss_fn, batch)


def _of_torch(model: nn.Module, x: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Subject:
    def loss_fn(piece: dict[str, Tensor]) -> Tensor:
        return loss(model(piece["x"]), piece["y"])

    return Subject(model.train(), loss_fn, {"x": x, "y": torch.arange(len(x)) % CLASSES})


def _tokens(samples: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (samples, length))


def _llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    tokens = _tokens(16, 16)
    return _of_transformers(LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens})


def _qwen2() -> Subject:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    tokens = _tokens(16, 16)
    return _of_transformers(Qwen2ForCausalLM(config), {"input_ids": tokens, "labels": tokens})


def _gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = _tokens(16, 16)
    return _of_transformers(GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens})


def _bert() -> Subject:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        num_labels=CLASSES,
    )
    batch = {"input_ids": _tokens(16, 16), "labels": torch.arange(16) % CLASSES}
    return _of_transformers(BertForSequenceClassification(config), batch)


def _t5() -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    batch = {"input_ids": _tokens(12, 16), "labels": _tokens(12, 8)}
    return _of_transformers(T5ForConditionalGeneration(config), batch)


def _vit() -> Subject:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
    )
    batch = {"pixel_values": torch.randn(16, 3, 32, 32), "labels": torch.arange(16) % CLASSES}
    return _of_transformers(ViTForImageClassification(config), batch)


def _wide_mlp() -> Subject:
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(128, CLASSES))
    return _of_torch(model, torch.randn(256, 128), F.cross_entropy)


class _Residuals(nn.Module):
    """Sixteen residual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, 64) to (samples, classes)."""
        for layer in self.layers:
            x = x + 0.1 * torch.relu(layer(x))
        logits: Tensor = self.head(x)
        return logits


def _deep_mlp() -> Subject:
    return _of_torch(_Residuals(), torch.randn(128, 64), F.cross_entropy)


class _Block(nn.Module):
    """Two convolutions with a norm each, and their input added."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            norm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return as many channels as are given."""
        return torch.relu(x + self.body(x))


def _resnet(norm: Callable[[int], nn.Module]) -> Subject:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        _Block(16, norm),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        _Block(32, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )
    return _of_torch(model, torch.randn(12, 3, 12, 12), F.cross_entropy)


def _resnet_groups() -> Subject:
    return _resnet(lambda width: nn.GroupNorm(4, width))


class _LastState(nn.Module):
    """An LSTM, classified by its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 32, 2, batch_first=True), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, 16) to (samples, classes)."""
        logits: Tensor = self.head(self.rnn(x)[0][:, -1])
        return logits


def _lstm() -> Subject:
    return _of_torch(_LastState(), torch.randn(32, 16, 16), F.cross_entropy)


class _Encoder(nn.Module):
    """A transformer encoder without dropout, classified by the mean of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, 32) to (samples, classes)."""
        logits: Tensor = self.head(self.encoder(x).mean(1))
        return logits


def _transformer() -> Subject:
    return _of_torch(_Encoder(), torch.randn(16, 16, 32), F.cross_entropy)


class _UNet(nn.Module):
    """Two floors down and up again, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = self._floor(3, 12), self._floor(12, 24)
        self.bottom = self._floor(24, 48)
        self.up, self.leave = self._floor(48 + 24, 24), self._floor(24 + 12, 12)
        self.head = nn.Conv2d(12, 3, 1)

    @staticmethod
    def _floor(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of the same size."""
        first = self.enter(x)
        second = self.down(F.avg_pool2d(first, 2))
        low = self.bottom(F.avg_pool2d(second, 2))
        high = self.up(torch.cat([F.interpolate(low, scale_factor=2), second], 1))
        image: Tensor = self.head(
            self.leave(torch.cat([F.interpolate(high, scale_factor=2), first], 1))
        )
        return image


def _unet() -> Subject:
    model, images = _UNet(), torch.randn(8, 3, 16, 16)

    def loss_fn(piece: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(piece["x"]), piece["y"])

    return Subject(model.train(), loss_fn, {"x": images, "y": images.flip(3)})


MODELS: Mapping[str, Callable[[], Subject]] = {
    "Llama": _llama,
    "Qwen2": _qwen2,
    "GPT-2": _gpt2,
    "BERT (dropout)": _bert,
    "T5": _t5,
    "ViT": _vit,
    "wide MLP": _wide_mlp,
    "deep MLP": _deep_mlp,
    "ResNet, GroupNorm": _resnet_groups,
    "ResNet, BatchNorm": lambda: _resnet(nn.BatchNorm2d),
    "LSTM": _lstm,
    "transformer": _transformer,
    "U-Net": _unet,
}
"""Maker of each subject. The first six are Hugging Face's; only BERT has dropout."""
