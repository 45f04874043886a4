from __future__ import annotations

import pytest
import torch

from vescale_ckpt.adapters.capture import capture
from vescale_ckpt.adapters.fresh import fresh_state
from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.per_rank import PerRank, RankPlace


def save(memory, values, meshes=None):
    """Store ``own`` of ranks, each at its place of a mesh."""
    meshes = meshes or [None] * len(values)
    captured = {
        rank: capture({"own": PerRank(value, mesh=mesh)}, rank=rank)
        for rank, (value, mesh) in enumerate(zip(values, meshes, strict=True))
    }
    return memory.store(captured)


def line(num):
    return [{"dp": (position, num)} for position in range(num)]


def spread(saved, here):
    """Deal the samples of all ranks anew."""
    samples = sorted(sample for _, value in saved for sample in value["samples"])
    return {"samples": samples[here.rank :: here.world_size], "from": [place.rank for place, _ in saved]}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_function_makes_the_values_of_another_world(memory, world_size):
    values = [{"samples": [r, r + 4], "from": [r]} for r in range(4)]
    stored = save(memory, values, line(4))
    dealt = []
    for rank in range(world_size):
        target = {"own": PerRank(None, mesh=line(world_size)[rank], reshard=spread)}
        restore = memory.load(stored, target, rank=rank, world_size=world_size)
        assert target["own"].value["from"] == [0, 1, 2, 3]
        assert target["own"].reshard is spread
        dealt += target["own"].value["samples"]
        (note,) = restore.notes
        assert all(word in note for word in ("'own'", "4 ranks (dp 4)", f"{world_size} ranks (dp", "spread"))
    assert sorted(dealt) == list(range(8)), "none is lost and none is dealt twice"


def test_it_is_told_all_places_and_gets_tensors_and_containers_as_they_were(memory):
    stored = save(memory, [(torch.full((2,), r), [r, {"x": b"y"}]) for r in range(2)], [{"dp": (1, 2)}, {"dp": (0, 2)}])
    seen = {}

    def take(saved, here):
        seen.update(saved=saved, here=here)
        return sum(tensor for _, (tensor, _) in saved)

    target = {"own": PerRank(0, mesh={"dp": (0, 1), "tp": (2, 3)}, reshard=take)}
    memory.load(stored, target, rank=2, world_size=3)
    assert target["own"].value.tolist() == [1, 1]
    assert seen["here"] == RankPlace(rank=2, world_size=3, mesh={"dp": 1, "tp": 3}, coordinate={"dp": 0, "tp": 2})
    assert [place.rank for place, _ in seen["saved"]] == [1, 0], "by coordinate"
    assert [place.world_size for place, _ in seen["saved"]] == [2, 2]
    assert seen["saved"][0][1][0].tolist() == [1, 1]
    assert seen["saved"][1][1][1] == [0, {"x": b"y"}]


def test_the_same_world_needs_no_function_and_calls_none(memory):
    def never(saved, here):
        raise AssertionError(saved, here)

    stored = save(memory, [5, 6], line(2)[::-1])
    target = {"own": PerRank(0, mesh={"dp": (1, 2)}, reshard=never)}
    restore = memory.load(stored, target, rank=1, world_size=2)
    assert target["own"].value == 5, "what stood at its coordinate, not what had its number"
    assert target["own"].mesh == {"dp": (1, 2)}
    assert restore.notes == ()


def test_another_mesh_of_as_many_ranks_is_another_world(memory):
    stored = save(memory, [5, 6], line(2))
    (problem,) = memory.problems(stored, {"own": PerRank(0, mesh={"tp": (1, 2)})}, rank=1, world_size=2)
    words = ("'own'", "2 ranks (dp 2)", "rank 1 at {'tp': 1}", "2 ranks (tp 2)", "reshard=")
    assert all(word in problem for word in words)
    target = {"own": PerRank(0, mesh={"tp": (1, 2)}, reshard=lambda saved, _: [value for _, value in saved])}
    memory.load(stored, target, rank=1, world_size=2)
    assert target["own"].value == [5, 6]


def test_a_mesh_that_this_rank_cannot_be_in_is_a_problem(memory):
    stored = save(memory, [5])
    (problem,) = memory.problems(stored, {"own": PerRank(0, mesh={"tp": (2, 2)})})
    assert "'own'" in problem
    with pytest.raises(InvalidInputError, match="'own'"):
        capture({"own": PerRank(0, mesh={"tp": (2, 2)})}, rank=0)


class Loader:
    def __init__(self, position=0):
        self.position, self.calls = position, 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]
        self.calls += 1


def total(saved, here):
    return {"position": sum(value["position"] for _, value in saved) + here.rank}


def test_an_object_is_given_the_new_state(memory):
    loader = Loader()
    target = {"own": PerRank(loader, reshard=total)}
    memory.load(save(memory, [Loader(3), Loader(4)]), target, rank=2, world_size=3)
    assert (loader.position, loader.calls) == (9, 1)
    assert target["own"].value is loader


class Wrapping:
    """An object whose own state has a value per rank in it."""

    def __init__(self, position, reshard=None):
        self.own = PerRank(position, reshard=reshard)

    def state_dict(self):
        return {"own": self.own}

    def load_state_dict(self, state):
        self.own = state["own"]


def test_a_value_per_rank_inside_an_objects_state_is_treated_alike(memory):
    stored = memory.store({rank: capture({"o": Wrapping(10 * rank)}, rank=rank) for rank in range(4)})
    for rank in range(4):
        target = Wrapping(0)
        memory.load(stored, {"o": target}, rank=rank, world_size=4)
        assert target.own == PerRank(10 * rank)
    for world_size in (2, 8):
        (problem,) = memory.problems(stored, {"o": Wrapping(0)}, rank=1, world_size=world_size, saved_world_size=4)
        assert "'o.own'" in problem
        target = Wrapping(0, reshard=lambda saved, here: [value for _, value in saved][here.rank :: here.world_size])
        memory.load(stored, {"o": target}, rank=1, world_size=world_size)
        assert target.own.value == list(range(0, 40, 10))[1::world_size]


def test_what_the_function_raises_is_raised(memory):
    def fails(saved, here):
        raise ValueError("cannot split")

    with pytest.raises(ValueError, match="cannot split"):
        memory.load(save(memory, [1, 2]), {"own": PerRank(0, reshard=fails)})


def test_ignored_or_left_out_it_is_not_called(memory):
    stored = save(memory, [1, 2])
    for options in (RestoreOptions(ignore=("own",)), RestoreOptions(only=("other",))):
        target = {"own": PerRank(7, reshard=total)}
        memory.load(stored, target, options=options)
        assert target["own"].value == 7


def test_a_state_made_of_a_snapshot_alone_has_the_values_without_their_places(memory):
    stored = save(memory, [torch.tensor(r) for r in range(3)], line(3)[::-1])
    fresh = fresh_state(stored.tree, stored.tensors)
    memory.fill(fresh, stored)
    assert {rank: value.tolist() for rank, value in fresh.state["own"].items()} == {0: 0, 1: 1, 2: 2}
