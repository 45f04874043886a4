"""Nested states as named leaves."""

from __future__ import annotations

import pytest
import torch

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.foreign.flatten import flatten
from vescale_ckpt.interop.foreign.machine import Named, Record


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def test_tensors_and_values_get_dotted_names_and_keep_their_paths():
    a, b = torch.ones(1), torch.zeros(1)
    state = {"model": {"w": a}, "list": [1, {"b": b}], "plain": [1, [2]], "n": None, "empty": {}, 3: (4, "x")}
    flat = flatten(state, is_tensor, "x")
    assert {name: path for name, (path, _) in flat.tensors.items()} == {
        "model.w": ("model", "w"),
        "list.1.b": ("list", 1, "b"),
    }
    assert flat.values == {"list.0": 1, "plain": [1, [2]], "n": None, "empty": {}, "3": (4, "x")}


def test_two_leaves_of_one_dotted_name_both_survive():
    a, b = torch.ones(1), torch.zeros(1)
    flat = flatten({"a.b": a, "a": {"b": b}}, is_tensor, "x")
    assert {name: tensor is a for name, (_, tensor) in flat.tensors.items()} == {"a.b": True, "('a', 'b')": False}


def test_records_are_their_fields():
    record = Record(Named("m", "C"), (), {"w": torch.ones(1), "n": 1})
    flat = flatten({"c": record, "v": [Record(Named("m", "C"), (1,))]}, is_tensor, "x")
    assert set(flat.tensors) == {"c.w"}
    assert flat.values == {"c.n": 1, "v": [[1]]}


def test_a_loop_is_refused():
    loop: list = [torch.ones(1)]
    loop.append(loop)
    with pytest.raises(FormatError, match="without end"):
        flatten(loop, is_tensor, "x")
    deep: dict = {}
    deep["a"] = deep
    with pytest.raises(FormatError, match="without end"):
        flatten(deep, is_tensor, "x")
    values: list = []
    values.append(values)
    with pytest.raises(FormatError, match="without end"):
        flatten({"v": values}, is_tensor, "x")
