"""The text of the demo as token sequences and packed rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shim import testing

VOCAB_SIZE = 256  # a token is a byte of UTF-8; byte 0 occurs in no text, so id 0 is free for padding
ROW = 512  # tokens
LONGEST = 150  # tokens of a sequence: longer documents are cut, so that every row holds several sequences
ALIGN = 16  # the padded rows align each sequence to this, as FP8 training does


def documents() -> dict[str, str]:
    """name -> text, all of examples/text."""
    files = sorted((Path(__file__).parent / "text").glob("*.txt"))
    return {file.stem: file.read_text("utf-8") for file in files}


def sequences() -> list[Tensor]:
    """int64 [n + 1] each, n <= LONGEST: whole documents, or pieces that share the token at which they were cut."""
    found = []
    for text in documents().values():
        tokens = torch.tensor(list(text.encode()))
        found += [tokens[start : start + LONGEST + 1] for start in range(0, len(tokens) - 1, LONGEST)]
    random.Random(0).shuffle(found)
    return found


def rows(align: int) -> list[testing.PackedRow]:
    """Rows of at most ROW tokens. They hold the same sequences whatever they are aligned to."""
    return [testing.pack(group, align=align) for group in _groups()]


def _groups() -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    free = ROW
    for sequence in sequences():
        length = -(-(len(sequence) - 1) // ALIGN) * ALIGN
        if group and length > free:
            yield group
            group, free = [], ROW
        group.append(sequence)
        free -= length
    yield group
