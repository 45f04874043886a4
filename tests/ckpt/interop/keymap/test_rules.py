"""The files of key maps."""

from __future__ import annotations

import json

import pytest
import torch

from vescale_ckpt.errors import ConfigError, NotFoundError
from vescale_ckpt.interop.keymap.rules import Operand, Rule, load_keymap, shipped_keymaps

HEAD = "version = 1\n"


def test_every_shipped_map_loads_in_both_directions():
    names = shipped_keymaps()
    assert names == tuple(
        f"{model}:{direction}"
        for model in ("gpt2", "llama", "mixtral")
        for direction in ("hf->megatron", "megatron->hf")
    )
    for name in names:
        keymap = load_keymap(name)
        assert len(keymap.rules) > 8
        assert {setting for setting, _ in keymap.settings} == {"heads", "kv_heads", "vocab"}


def test_a_file_is_read_as_toml_or_json_in_either_direction(tmp_path):
    (tmp_path / "m.toml").write_text(HEAD + '[[rule]]\nfrom = "a.{i}"\nto = ["b.{i}", "c.{i}"]\ntranspose = true\n')
    table = {"version": 1, "rule": [{"from": "a.{i}", "to": ["b.{i}", "c.{i}"], "transpose": True}]}
    (tmp_path / "m.json").write_text(json.dumps(table))
    for name in ("m.toml", "m.json"):
        forward = load_keymap(str(tmp_path / name))
        assert forward.rules == (Rule((Operand("a.{i}"),), (Operand("b.{i}"), Operand("c.{i}")), transpose=True),)
        back = load_keymap(f"{tmp_path / name}:to->from")
        assert back.rules == (Rule((Operand("b.{i}"), Operand("c.{i}")), (Operand("a.{i}"),), transpose_after=True),)


def test_casts_and_parts(tmp_path):
    text = HEAD + '[[rule]]\nfrom = "a[1/3]"\nto = "b"\n[[cast]]\nmatch = ".*"\ndtype = "bfloat16"\n'
    (tmp_path / "m.toml").write_text(text)
    keymap = load_keymap(str(tmp_path / "m.toml"), {"heads": 3})
    assert keymap.rules[0].sources == (Operand("a", 1, 3),)
    assert keymap.casts == ((".*", torch.bfloat16),)
    assert keymap.given == (("heads", 3),)


@pytest.mark.parametrize(
    "text",
    [
        "version = 2\n",
        "nonsense",
        HEAD + "rules = 3\n",
        HEAD + 'unmatched = "maybe"\n',
        HEAD + 'sides = ["a", "a"]\n',
        HEAD + "[[rule]]\n",
        HEAD + '[[rule]]\nfrom = ["a", "b"]\nto = ["c", "d"]\n',
        HEAD + '[[rule]]\nfrom = ["a", "b"]\nto = "c"\nlayout = "grouped_qkv"\n',
        HEAD + '[[rule]]\nfrom = "a.{i}"\nto = "b.{j}"\n',
        HEAD + '[[rule]]\nfrom = "a"\nto = "b"\nlayout = "woven"\n',
        HEAD + '[[rule]]\nfrom = "("\nto = "b"\nregex = true\n',
        HEAD + '[[cast]]\nmatch = ".*"\n',
    ],
)
def test_what_is_no_map_is_refused(tmp_path, text):
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"m\.toml"):
        load_keymap(str(tmp_path / "m.toml"))


def test_unknown_names_are_told():
    with pytest.raises(NotFoundError, match="llama:hf->megatron"):
        load_keymap("bert:hf->megatron")
    with pytest.raises(ConfigError, match="directions"):
        load_keymap("llama:hf->jax")
    with pytest.raises(NotFoundError):
        load_keymap("./nothing.toml")
