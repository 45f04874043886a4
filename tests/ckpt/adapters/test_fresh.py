from __future__ import annotations

import collections
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from vescale_ckpt.adapters.capture import capture
from vescale_ckpt.adapters.fresh import fresh_state
from vescale_ckpt.errors import StateError
from vescale_ckpt.state.per_rank import PerRank


def made(memory, stored, **more):
    fresh = fresh_state(stored.tree, stored.tensors, **more)
    memory.fill(fresh, stored)
    return fresh.state


def test_a_whole_state_comes_back_with_its_types(memory):
    state = {
        "a": [torch.arange(3.0), (torch.tensor(1), {"k": torch.empty(0, 2)})],
        "np": np.arange(4).reshape(2, 2),
        "io": io.BytesIO(b"xyz"),
        "big": bytes(range(256)) * 20,
        "plain": {"none": None, "int": 2**70, "float": -0.0, "dtype": torch.bfloat16, "size": torch.Size((2,))},
        "ordered": collections.OrderedDict(b=1, a=2),
        "counts": collections.Counter("aab"),
        "a.b": torch.ones(1, dtype=torch.bfloat16),
        7: "int key",
    }
    found = made(memory, memory.save(state))
    assert list(found) == list(state)
    assert torch.equal(found["a"][0], state["a"][0])
    assert torch.equal(found["a"][1][1]["k"], torch.empty(0, 2))
    assert isinstance(found["a"][1], tuple)
    assert type(found["np"]) is np.ndarray
    assert np.array_equal(found["np"], state["np"])
    assert found["io"].getvalue() == b"xyz"
    assert found["big"] == state["big"]
    assert found["plain"] == state["plain"]
    assert [type(found[key]) for key in ("ordered", "counts")] == [collections.OrderedDict, collections.Counter]
    assert list(found["ordered"].items()) == [("b", 1), ("a", 2)]
    assert found["a.b"].dtype == torch.bfloat16


def test_aliases_share_their_memory(memory):
    p = torch.arange(6.0)
    array = np.arange(3.0)
    found = made(memory, memory.save({"x": p, "y": p, "z": p.clone(), "n": array, "m": array}))
    assert found["x"].data_ptr() == found["y"].data_ptr() != found["z"].data_ptr()
    assert np.shares_memory(found["n"], found["m"])
    assert torch.equal(found["y"], p)


def test_modules_and_optimizers_come_as_dicts_by_name(memory):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = made(memory, memory.save({"m": model, "o": optimizer}))
    nn.Linear(2, 2).load_state_dict(found["m"])
    assert found["o"]["state"].keys() == {"weight", "bias"}
    assert found["o"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert torch.equal(found["o"]["state"]["weight"]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_it_can_be_saved_again_as_it_was(memory):
    state = {"x": torch.ones(2), "own": PerRank({"a": torch.zeros(1)}), "l": [1, (2,)]}
    stored = memory.save(state)
    again = memory.save(made(memory, stored, rank=0))
    assert again.tree == stored.tree
    assert again.tensors == stored.tensors


def test_values_per_rank_are_those_of_a_rank_or_of_all(memory):
    stored = memory.store({r: capture({"own": PerRank([r, torch.tensor(r)])}, rank=r) for r in range(2)})
    assert made(memory, stored, rank=1)["own"] == PerRank([1, torch.tensor(1)])
    assert made(memory, stored)["own"] == {0: [0, torch.tensor(0)], 1: [1, torch.tensor(1)]}
    fresh = fresh_state(stored.tree, stored.tensors, rank=2)
    assert "'own'" in fresh.problems[0]
    with pytest.raises(StateError):
        fresh.finish()


def test_a_tensor_subclass_cannot_be_made_from_nothing(memory):
    stored = memory.save({"w": TwoTensor(torch.zeros(1), torch.zeros(1))})
    (line,) = fresh_state(stored.tree, stored.tensors).problems
    assert "'w'" in line
    assert "TwoTensor" in line


def test_the_state_is_there_when_it_is_finished(memory):
    stored = memory.save({"a": 1})
    fresh = fresh_state(stored.tree, stored.tensors)
    with pytest.raises(StateError, match="finish"):
        _ = fresh.state
    fresh.finish()
    assert fresh.state == {"a": 1}


def test_any_root(memory):
    assert made(memory, memory.save([1, 2])) == [1, 2]
    assert made(memory, memory.save(None)) is None
    assert torch.equal(made(memory, memory.save(torch.ones(2))), torch.ones(2))
