from __future__ import annotations

import torch
from torch import nn

from vescale_ckpt.adapters.draft import Draft, Ranks
from vescale_ckpt.adapters.names import ParameterNames
from vescale_ckpt.adapters.options import RestoreOptions, Selector
from vescale_ckpt.adapters.stored_parameters import StoredParameters


def finder(stored, state, **options):
    selector = Selector(RestoreOptions(**options))
    draft = Draft(stored.tree, stored.tensors, selector, ranks=Ranks(rank=0), same_content=None)
    return StoredParameters(draft, ParameterNames(state))


def test_a_parameter_goes_by_its_own_name_first(memory):
    model = nn.Linear(3, 2)
    found = finder(memory.save({"m": model}), {"m": model}).find(model.weight, {"weight", "bias"})
    assert (found.name, found.others, found.shape, found.dtype) == ("weight", (), (2, 3), "float32")
    assert found.root == ("m", "weight")


def test_a_name_with_the_place_of_its_module_comes_before_that(memory):
    model = nn.Linear(3, 2)
    found = finder(memory.save({"m": model}), {"m": model}).find(model.weight, {"weight", "m.weight"})
    assert (found.name, found.others) == ("m.weight", ("weight",))


def test_a_name_that_the_snapshot_does_not_have_is_none(memory):
    model = nn.Linear(3, 2)
    assert finder(memory.save({"m": model}), {"m": model}).find(model.weight, {"bias"}) is None


def test_names_of_the_targets_ties_and_of_the_snapshots(memory):
    tied, loose = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    stored = memory.save({"m": tied})
    assert finder(stored, {"m": tied}).find(tied["b"].weight, {"b.weight"}).name == "b.weight"
    assert finder(stored, {"m": loose}).find(loose["b"].weight, {"a.weight"}).name == "a.weight"
    both = finder(stored, {"m": tied}).find(tied["a"].weight, {"b.weight", "a.weight"})
    assert (both.name, both.others) == ("a.weight", ("b.weight",))


def test_renames_are_followed(memory):
    saved, target = nn.ModuleDict({"enc": nn.Linear(2, 2)}), nn.ModuleDict({"encoder": nn.Linear(2, 2)})
    found = finder(memory.save({"net": saved}), {"m": target}, rename={"m": "net", "m.encoder": "net.enc"})
    parameter = found.find(target["encoder"].weight, {"enc.weight"})
    assert parameter.name == "enc.weight"
    assert parameter.root == ("net", "enc.weight")
    assert found.name(target["encoder"].weight) == "encoder.weight"


def test_a_snapshot_without_the_model(memory):
    model = nn.Linear(2, 2)
    found = finder(memory.save({"o": torch.zeros(1)}), {"m": model}).find(model.weight, {"weight"})
    assert (found.name, found.root, found.shape, found.dtype) == ("weight", None, None, None)
