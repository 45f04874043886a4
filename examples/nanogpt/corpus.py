"""Text that every machine with Python has: the sources of its standard library, as characters.

The order of the data is a pure function of (seed, number of the sample). So that pair is all the state there is, and a
run sees the same samples in the same order on one rank or on a hundred, after any number of restarts.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
"""Printable ASCII and the line break. Its 96 characters are the vocabulary."""

VOCAB_SIZE = len(ALPHABET)
DEFAULT_SIZE = 1_000_000


def standard_library_text(num_characters: int = DEFAULT_SIZE) -> str:
    """Return the first characters of the standard library's top-level modules, in order of their names.

    Characters outside the alphabet are dropped, and a tab counts as four spaces.
    """
    kept = set(ALPHABET)
    parts: list[str] = []
    missing = num_characters
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore").replace("\t", "    ")
        text = "".join(filter(kept.__contains__, source))[:missing]
        parts.append(text)
        missing -= len(text)
        if not missing:
            break
    return "".join(parts)


@dataclass(frozen=True)
class Corpus:
    """A text as token numbers, from which samples are drawn."""

    text: str

    @cached_property
    def tokens(self) -> Tensor:
        """The whole text, int64[characters]."""
        number_of = {character: number for number, character in enumerate(ALPHABET)}
        return torch.tensor([number_of[character] for character in self.text])

    @cached_property
    def digest(self) -> str:
        """A name for this exact text: another Python version has other sources."""
        return hashlib.sha256(self.text.encode("ascii")).hexdigest()

    def sample(self, seed: int, index: int, length: int) -> Tensor:
        """Return sample number ``index`` of the endless stream that ``seed`` names, int64[length + 1].

        One more than ``length``: the input is all but the last token, the target all but the first.
        """
        start = random.Random(f"{seed}/{index}").randrange(len(self.text) - length)  # noqa: S311  no secret
        return self.tokens[start : start + length + 1]

    def batch(self, seed: int, indices: range, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some samples, each int64[samples, length]."""
        samples = torch.stack([self.sample(seed, index, length) for index in indices])
        return samples[:, :-1], samples[:, 1:]


def share_of(rank: int, num_ranks: int, batch: range) -> range:
    """Return the part of a global batch that one data-parallel rank computes: contiguous, equal parts."""
    if len(batch) % num_ranks:
        raise ValueError(f"a batch of {len(batch)} samples cannot be shared equally by {num_ranks} ranks")
    size = len(batch) // num_ranks
    return batch[rank * size : (rank + 1) * size]
