"""Real text: the source files of Python's standard library, or the user's own files."""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from elastic_mbs.errors import UsageError

Batch = dict[str, Tensor]

IGNORED = -100
SHORTEST = 32  # bytes of the shortest document: what is shorter is a lone bracket or an import
# batches whose documents are sorted by length together: little padding, and batches that differ in
# length
BUCKET = 3


def passages(text: bytes, longest: int) -> Iterator[bytes]:
    """Cut a text at its blank lines, and longer passages into pieces of `longest` bytes."""
    for passage in re.split(rb"\r?\n[ \t]*\r?\n", text):
        stripped = passage.strip(b"\r\n")
        for start in range(0, len(stripped), longest):
            piece = stripped[start : start + longest]
            if len(piece) >= SHORTEST:
                yield piece


def read_documents(path: Path | None, *, count: int, longest: int, seed: int) -> list[bytes]:
    """Return `count` passages, chosen at random and repeated where there are too few.

    They come from a file, from a folder and all below it, or (None) from Python's library.
    """
    rng = random.Random(seed)
    if path is None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif path.is_dir():
        shown = (
            file
            for file in path.rglob("*")
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        files = sorted(file for file in shown if file.is_file())
    else:
        files = [path]
    rng.shuffle(files)
    found: list[bytes] = []
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise UsageError(f"--text {file}: {error.strerror or error}") from error
        if b"\0" not in content:  # else it is not a text
            found.extend(passages(content, longest))
        if len(found) >= 4 * count:
            break
    if not found:
        raise UsageError(
            f"--text {path}: no passage of at least {SHORTEST} bytes in {len(files)} file(s); "
            "name a text with --text PATH"
        )
    rng.shuffle(found)
    return [found[i % len(found)] for i in range(count)]


def collate(documents: Sequence[bytes]) -> Batch:
    """Return columns "tokens" (documents, length) and "labels" for documents.

    A label is the byte that follows its token. Columns are padded to the longest document, with
    -100 as label.
    """
    encoded = [torch.tensor(list(document)) for document in documents]
    tokens = pad_sequence([row[:-1] for row in encoded], batch_first=True)
    labels = pad_sequence([row[1:] for row in encoded], batch_first=True, padding_value=IGNORED)
    return {"tokens": tokens, "labels": labels}


class Loader:
    """A data loader: each batch has documents of similar length.

    Each pass gives the same batches, made one at a time.
    """

    def __init__(self, documents: Sequence[bytes], batch: int, seed: int) -> None:
        rng = random.Random(seed)
        self._chunks: list[list[bytes]] = []
        for start in range(0, len(documents), BUCKET * batch):
            bucket = sorted(documents[start : start + BUCKET * batch], key=len)
            chunks = [bucket[i : i + batch] for i in range(0, len(bucket), batch)]
            rng.shuffle(chunks)
            for chunk in chunks:
                # else every batch would have its longest documents in the last piece
                rng.shuffle(chunk)
            self._chunks += chunks

    def __iter__(self) -> Iterator[Batch]:
        return map(collate, self._chunks)

    def longest(self, documents: int) -> Batch:
        """Return `documents` documents of the batch with the longest one, which is among them."""
        return collate(
            sorted(max(self._chunks, key=lambda chunk: max(map(len, chunk))), key=len)[-documents:]
        )
