"""Functions, attention, layers and edges on cut tensors, in a real world of two ranks, against one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORLD = str(Path(__file__).with_name("rules_world.py"))
FAR = 2e-6
"""Relative to the largest value of a tensor."""


@pytest.fixture(scope="module")
def found():
    ranks = launch(f"{WORLD}:main", 2, deadline_seconds=180)
    assert ranks[0].keys() == ranks[1].keys()
    return ranks


@pytest.mark.distributed
def test_a_function_gives_on_any_cut_what_it_gives_whole(found):
    for rank in found:
        assert len(rank["functions"]) > 60
        for name, apart in rank["functions"].items():
            assert apart <= (0.0 if name.endswith("exact") else FAR), name


@pytest.mark.distributed
def test_attention_by_heads_gives_what_whole_attention_gives(found):
    for rank in found:
        assert len(rank["attention"]) == 25
        for name, apart in rank["attention"].items():
            assert apart <= FAR, name


@pytest.mark.distributed
def test_a_module_with_all_that_forwards_do_gives_what_one_device_gives(found):
    for rank in found:
        assert len(rank["modules"]) == 10
        for name, result in {**rank["modules"], **rank["checkpointed"]}.items():
            assert result["loss"] <= FAR, name
            assert result["gradient"] <= FAR, name
            assert result["bits"] or not name.startswith("exact"), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("twice", "it is parallel already"),
        ("a DTensor", "'0.weight': it is a DTensor already"),
        ("a plan", "parameter['weigth'] matches no name; nearest: 'weight'"),
        ("not asked", "call vescale_train.parallelize(model, mesh) first"),
        ("values", "speaks of 2 values, but forward was given or gave 1"),
        ("a number", "found a int, want a tensor"),
        ("factories", "what is made in forward is replicated"),
        ("axes", "name one 'tp', or pass a slice of a single axis"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(found, case, said):
    for rank in found:
        assert said in rank["refusals"][case]
