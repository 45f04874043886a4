from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_model

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.safetensors.ties import TIES_KEY, decode_ties, encode_ties

WHAT = "/models/x.safetensors"


def test_ties_come_back():
    ties = {"head.weight": "embed.weight", "format": "embed.weight", "ä": "b"}
    metadata = {"format": "pt", **encode_ties(ties)}
    assert metadata["head.weight"] == "embed.weight"  # what other tools look for
    assert metadata["format"] == "pt"
    assert decode_ties(metadata, {"embed.weight", "b"}, WHAT) == ties


def test_no_ties_are_no_metadata():
    assert encode_ties({}) == {}
    assert decode_ties({"format": "pt"}, {"pt", "w"}, WHAT) == {}


def test_what_the_library_writes_is_understood(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    save_model(model, str(tmp_path / "x.safetensors"))
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert decode_ties(file.metadata(), set(file.keys()), WHAT) == {"b.weight": "a.weight"}


def test_other_metadata_are_no_ties():
    metadata = {"author": "somebody", "w": "v", "total_size": "v", "number": 3}
    assert decode_ties(metadata, {"v", "w"}, WHAT) == {}


@pytest.mark.parametrize(
    "text",
    ["nope", "[]", '{"a": 1}', '{"a": "gone"}', '{"w": "w"}', '{"a": "w", "a": "w"}', '{"a": "b", "b": "w"}', 5],
)
def test_our_own_entry_is_not_guessed_at(text):
    with pytest.raises(FormatError, match=WHAT):
        decode_ties({TIES_KEY: text}, {"w"}, WHAT)
