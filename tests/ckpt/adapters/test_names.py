from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from vescale_ckpt.adapters.names import (
    ModuleExtra,
    ParameterNames,
    find_modules,
    names_in,
    names_node,
    unwrap,
    walk_module,
)
from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.tree import DictNode, ListNode, ValueNode


class WithExtra(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("no_bias", None)

    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


def names(module):
    return [item.name for item in walk_module(module)]


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), WithExtra()),
        nn.TransformerDecoderLayer(4, 2, 4),
        nn.ModuleDict({"a": nn.Linear(1, 1)}),
        nn.LSTM(2, 3, num_layers=2),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.ParameterList([torch.zeros(1), torch.zeros(2)]),
    ],
    ids=lambda module: type(module).__name__,
)
def test_names_and_order_are_those_of_state_dict(module):
    assert names(module) == list(module.state_dict())


def test_ties_and_shared_modules_come_under_all_names():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(2, 2)})
    model["c"].weight = shared.weight
    assert names(model) == ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"]


def test_buffers_that_are_not_persistent_are_left_out_and_extra_state_is_in():
    items = list(walk_module(WithExtra()))
    assert [item.name for item in items] == ["seen", "_extra_state"]
    assert isinstance(items[1], ModuleExtra)


def test_wrappers_are_taken_off_where_they_stand():
    model = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))))
    wrapped = torch.compile(nn.DataParallel(model), backend="eager")
    plain = ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert names(wrapped) == plain
    assert unwrap(wrapped) is model
    inner = nn.Sequential(
        torch.compile(nn.Linear(2, 2), backend="eager"),
        checkpoint_wrapper(torch.compile(nn.Linear(2, 2), backend="eager")),
    )
    assert names(inner) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_users_own_attribute_keeps_its_name():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)
            self._orig_mod = nn.Linear(1, 1)
            self._checkpoint_wrapped_module = nn.Linear(1, 1, bias=False)

    assert names(Holder())[::2] == ["module.weight", "_orig_mod.weight", "_checkpoint_wrapped_module.weight"]
    assert "module.weight" in names(torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)))


def test_fsdp1_has_the_names_of_what_it_wraps_or_is_refused(fake_world):
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415

    fake_world(0, 2)
    model, hides = (
        FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=keeps)
        for keeps in (True, False)
    )
    weight, bias = walk_module(nn.Sequential(model))
    assert (weight.name, bias.name) == ("0.weight", "0.bias")
    assert [item.flat.shape for item in (weight, bias)] == [(3, 4), (3,)]
    assert (weight.flat.numel, weight.value.global_shape) == (8, (3, 4)), "half of 15 elements and one of padding"
    assert ParameterNames({"m": model}).flat(model.weight) == weight.flat
    with pytest.raises(InvalidInputError, match="use_orig_params=True"):
        names(nn.Sequential(hides))


def test_a_module_that_writes_keys_of_its_own_is_refused():
    class Private(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "secret"] = torch.zeros(1)

    class Harmless(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    with pytest.raises(InvalidInputError, match=r"'0'.*secret.*state_dict\(\)"):
        names(nn.Sequential(Private(1, 1)))
    assert names(Harmless(1, 1)) == ["weight", "bias"]


def test_modules_are_found_anywhere_in_a_state():
    a, b, c = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    state = {"a": a, "more": [1, (b, {"x": "y"})], "own": PerRank({"c": c})}
    assert list(find_modules(state)) == [(("a",), a), (("more", 1, 0), b), (("own", "c"), c)]


def test_parameters_are_named_by_identity_over_all_modules():
    a, b = nn.Linear(1, 1), nn.Linear(2, 2)
    b.weight2 = a.weight
    found = ParameterNames({"a": a, "b": b})
    assert [(n.module, n.name) for n in found.of(a.weight)] == [(("a",), "weight"), (("b",), "weight2")]
    assert found.of(nn.Parameter(torch.zeros(1))) == ()


def test_names_of_two_modules_that_meet_start_with_their_place():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    found = ParameterNames({"a": a, "b": b})
    one = torch.optim.SGD(a.parameters())
    both = torch.optim.SGD([*a.parameters(), *b.parameters()])
    assert list(found.of_optimizer(one, ("o",)).values()) == ["weight", "bias"]
    assert list(found.of_optimizer(both, ("o",)).values()) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_a_parameter_without_a_name_is_an_error_with_a_way_out():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([model.weight, nn.Parameter(torch.zeros(1))])
    with pytest.raises(InvalidInputError, match=r"'opt'.*1 of its 2 .*put the model in the state too"):
        ParameterNames({"m": model}).of_optimizer(optimizer, ("opt",))


def test_a_set_of_names_survives_a_node():
    assert names_in(names_node(["b", "a"])) == ("b", "a")
    assert names_in(names_node([])) == ()
    assert names_in(ListNode((ValueNode("x"),))) == ("x",)
    assert names_in(ListNode((ValueNode(0),))) is None
    assert names_in(DictNode((("a", ValueNode(1)),))) is None
    assert names_in(None) is None
