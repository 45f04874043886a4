from __future__ import annotations

import pytest
from torch import nn

from tests.train import models as other_models
from tests.train.pipe.models import MODELS
from vescale_train.pipe.errors import SplitError
from vescale_train.pipe.model.units import find_units


def test_blocks_are_units_and_so_is_what_stands_beside_them():
    units = find_units(MODELS["tied"]()[0])
    assert units.names == ("embed", *(f"blocks.{n}" for n in range(8)), "norm", "head")
    assert units.blocks == range(1, 9)
    assert units.glue == ("positions",)


def test_several_lists_and_none():
    units = find_units(MODELS["skips"]()[0])
    assert units.blocks == range(8)
    plain = nn.Module()
    plain.one, plain.two = nn.Linear(2, 2), nn.Linear(2, 2)
    assert find_units(plain).names == ("one", "two")
    assert find_units(plain).blocks == range(2)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [("llama", "model.embed_tokens", "lm_head"), ("gpt2", "transformer.wte", "lm_head")],
)
def test_models_of_other_people_as_they_are(name, first, last):
    units = find_units(other_models.make(name))
    assert (units.names[0], units.names[-1]) == (first, last)
    assert len(units.blocks) == other_models.LAYERS
    assert not units.glue


def test_lists_of_lists_without_a_forward_are_opened():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
    assert find_units(model).names == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")


def test_what_is_asked_to_stay_whole_does():
    model = nn.Module()
    model.body = nn.Module()
    model.body.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.head = nn.Linear(2, 2)
    assert find_units(model, ["body"]).names == ("body", "head")
    with pytest.raises(SplitError, match="no module of the model has such a name"):
        find_units(model, ["tail"])


def test_a_block_under_two_names_is_one_unit():
    block = nn.Linear(2, 2)
    assert find_units(nn.Sequential(block, nn.Linear(2, 2), block)).names == ("0", "1")


def test_a_model_without_modules_cannot_be_cut():
    with pytest.raises(SplitError, match="it has no modules inside"):
        find_units(nn.Linear(2, 2))
