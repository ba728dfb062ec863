"""The in-batch negatives of sentence-transformers are the whole batch's, under errors, too."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from stress.reference.state import error_of
from tests.helpers.steps import elastic, grads
from tests.helpers.strikes import every_operation

pytestmark = pytest.mark.no_oom_injection

Columns = tuple[dict[str, Tensor], ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A BERT of one layer, and a tokenizer trained on the text of Python's library."""
    here: Path = tmp_path_factory.mktemp("bert")
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    words.train_from_iterator(
        lines(), trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(special.values()))
    )
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(here)
    size: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 300,
    }
    BertModel(
        BertConfig(**size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ).save_pretrained(here)
    transformer = Transformer(str(here))
    return SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu").double()


def lines() -> list[str]:
    return [
        line.strip() for line in inspect.getsource(argparse).splitlines() if len(line.strip()) > 20
    ]


@pytest.fixture(scope="module")
def columns(model: Any) -> Columns:
    """Eight anchors and eight positives."""
    text = lines()
    return tuple(dict(model.preprocess(text[start : start + 8])) for start in (20, 120))


def whole(model: Any, loss: Any, columns: Columns) -> list[Tensor | None]:
    """The gradient of sentence-transformers' own call on the whole batch."""
    model.zero_grad()
    loss([dict(column) for column in columns], None).backward()
    wanted = grads(model)
    model.zero_grad()
    return wanted


def embed(model: Any) -> Callable[[Columns], list[Tensor]]:
    return lambda columns: [model(dict(column))["sentence_embedding"] for column in columns]


def test_the_negatives_are_the_whole_batchs_whatever_runs_out_of_memory(
    model: Any, columns: Columns
) -> None:
    loss = MultipleNegativesRankingLoss(model)
    wanted = whole(model, loss, columns)
    for inject in every_operation(stride=97, least=230):
        model.zero_grad()
        with inject, elastic(model, micro_batch_size=3) as mbs:
            mbs.backward_embeddings(
                embed(model),
                lambda embeddings: loss.compute_loss_from_embeddings(embeddings, None),
                columns,
            )
        # a key's bias has no gradient but rounding
        assert error_of(grads(model), wanted, floor=1e-6) <= 1e-12, inject.hits


def test_verify_says_that_the_loss_compares_samples(model: Any, columns: Columns) -> None:
    loss = MultipleNegativesRankingLoss(model)
    with elastic(model) as mbs:
        report = mbs.verify(
            lambda features: loss([dict(column) for column in features], None), columns
        )
    assert not report.ok
    assert "compares samples" in str(report)
