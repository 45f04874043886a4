"""A text as samples of bytes: the data set of this example, indexed by ints as ``vt.data`` asks for."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
"""Every byte is a token."""


def read_text(path: Path | None, most_bytes: int = 1_000_000) -> bytes:
    """Return a file's bytes, or without one those of the standard library's modules, in order of their names."""
    if path is not None:
        return path.read_bytes()
    text = b""
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += module.read_bytes()
        if len(text) >= most_bytes:
            break
    return text[:most_bytes]


class TextBytes:
    """Stretches of a text, one behind the other; a rest that does not fill one is left out.

    Args:
        text: at least ``context`` bytes.
        context: tokens a sample.

    Raises:
        ValueError: the text does not fill one sample.
    """

    def __init__(self, text: bytes, context: int) -> None:
        if len(text) < context:
            raise ValueError(f"a text of {len(text)} bytes does not fill one sample of {context}")
        self._context = context
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._tokens) // self._context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample as models of Hugging Face take it; they shift the labels by themselves."""
        start = index * self._context
        tokens = self._tokens[start : start + self._context].long()
        return {"input_ids": tokens, "labels": tokens}
