"""Real text that every machine has: the source files of Python's standard library, or the user's own."""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from elastic_mbs.errors import UsageError

Batch = dict[str, Tensor]

PAD = 0
IGNORED = -100
SHORTEST = 32
"""Bytes of the shortest document: what lies below is a lone bracket or an import."""
BUCKET = 3
"""Batches whose documents are sorted by length together, so that short ones are padded little and batches differ in length."""


def find_files(path: Path | None) -> list[Path]:
    """The files to read, in a fixed order.

    Args:
        path: a file, a folder (all files in it and below), or None for the standard library's modules.

    Raises:
        UsageError: there is no such path, or no file in it.
    """
    if path is None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        if not files:
            raise UsageError("this Python has no source files of its standard library: name a text with --text PATH")
        return files
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"--text {path}: there is no such file or folder")
    files = sorted(file for file in path.rglob("*") if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts))
    if not files:
        raise UsageError(f"--text {path}: the folder has no files in it")
    return files


def passages(text: bytes, longest: int) -> Iterator[bytes]:
    """Cuts a text at its blank lines, and what is longer than `longest` bytes into pieces of that length."""
    for passage in re.split(rb"\r?\n[ \t]*\r?\n", text):
        stripped = passage.strip(b"\r\n")
        for start in range(0, len(stripped), longest):
            piece = stripped[start : start + longest]
            if len(piece) >= SHORTEST:
                yield piece


def read_documents(path: Path | None, *, count: int, longest: int, seed: int) -> list[bytes]:
    """Reads `count` documents of at most `longest` bytes each: all passages of all files if those are fewer, a random choice of them if not.

    Files come in an order that depends on the seed alone; they are read until there are enough passages to choose from. A text that has too few
    is gone through more than once.

    Args:
        path: see `find_files`.
        count: documents wanted.
        longest: bytes.
        seed: of the choice and the order.

    Raises:
        UsageError: there is no such path, it cannot be read, or it has no passage of at least 32 bytes.
    """
    rng = random.Random(seed)
    files = find_files(path)
    rng.shuffle(files)
    found: list[bytes] = []
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise UsageError(f"--text {file}: {error.strerror or error}") from error
        if b"\0" not in content:  # a binary file is no text
            found.extend(passages(content, longest))
        if len(found) >= 4 * count:
            break
    if not found:
        raise UsageError(f"--text {path}: no passage of at least {SHORTEST} bytes in {len(files)} file(s)")
    rng.shuffle(found)
    return [found[i % len(found)] for i in range(count)]


def collate(documents: Sequence[bytes]) -> Batch:
    """Documents as one batch, padded to its longest.

    Returns:
        "tokens" (documents, length), what the model sees, and "labels" of the same shape, the byte that follows each; -100 in the padding.
    """
    length = max(map(len, documents)) - 1
    tokens = torch.full((len(documents), length), PAD)
    labels = torch.full((len(documents), length), IGNORED)
    for row, document in enumerate(documents):
        encoded = torch.tensor(list(document))
        tokens[row, : len(document) - 1] = encoded[:-1]
        labels[row, : len(document) - 1] = encoded[1:]
    return {"tokens": tokens, "labels": labels}


class Loader:
    """One batch per step, of documents that are roughly as long as each other: the lengths of the batches differ.

    It can be gone through any number of times, always with the same batches; they are made one at a time, so that none but the present one takes
    memory.

    Args:
        documents: `steps · batch` of them.
        batch: documents per batch.
        seed: of the order.
    """

    def __init__(self, documents: Sequence[bytes], batch: int, seed: int) -> None:
        rng = random.Random(seed)
        self._chunks: list[list[bytes]] = []
        for start in range(0, len(documents), BUCKET * batch):
            bucket = sorted(documents[start : start + BUCKET * batch], key=len)
            chunks = [bucket[i : i + batch] for i in range(0, len(bucket), batch)]
            rng.shuffle(chunks)
            for chunk in chunks:
                rng.shuffle(chunk)  # or every batch would have its longest documents in the last piece
            self._chunks += chunks

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._chunks)

    def __iter__(self) -> Iterator[Batch]:
        """The batches, in order."""
        return map(collate, self._chunks)

    def longest(self) -> Batch:
        """The batch with the longest document."""
        return collate(max(self._chunks, key=lambda chunk: max(map(len, chunk))))
