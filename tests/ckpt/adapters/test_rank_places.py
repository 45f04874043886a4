from __future__ import annotations

import itertools

import pytest

from vescale_ckpt.adapters.rank_places import COORDINATE_KEY, VALUE_KEY, axes_of, entries_of, entry_node, own_entry
from vescale_ckpt.errors import FormatError, InvalidInputError
from vescale_ckpt.state.per_rank import PerRank, RankPlace
from vescale_ckpt.state.tree import DictNode, PerRankNode, TupleNode, ValueNode

MESH = {"dp": 2, "tp": 3}


def coordinates(mesh):
    return [dict(zip(mesh, at, strict=True)) for at in itertools.product(*map(range, mesh.values()))]


def place(rank, mesh=MESH, at=None, world_size=6):
    return RankPlace(rank=rank, world_size=world_size, mesh=mesh, coordinate=at or coordinates(mesh)[rank])


def saved(mesh, order=None):
    """What ranks 0.. saved, standing at the coordinates of a mesh in an order."""
    at = coordinates(mesh)
    nodes = [
        entry_node({axis: (position, mesh[axis]) for axis, position in at[i].items()}, ValueNode(f"of {at[i]}"))
        for i in order or range(len(at))
    ]
    return PerRankNode(tuple(enumerate(nodes)))


def test_a_value_without_a_mesh_is_stored_as_it_is():
    assert axes_of(PerRank(1), "x") == {}
    assert entry_node({}, ValueNode(1)) == ValueNode(1)
    (entry,) = entries_of(PerRankNode(((4, ValueNode(1)),)), ("x",), 5)
    assert (entry.path, entry.node) == (("x", 4), ValueNode(1))
    assert entry.place == RankPlace(rank=4, world_size=5)


def test_a_value_with_a_mesh_says_where_it_was():
    assert axes_of(PerRank(1, mesh={"dp": (1, 2)}), "x") == {"dp": (1, 2)}
    entries = entries_of(saved(MESH), ("x",))
    assert [entry.place for entry in entries] == [place(rank) for rank in range(6)]
    assert entries[4].path == ("x", 4, VALUE_KEY)
    assert entries[4].node == ValueNode("of {'dp': 1, 'tp': 1}")


def test_a_users_dict_is_not_taken_for_a_place():
    for node in (DictNode(((VALUE_KEY, ValueNode(1)),)), DictNode(()), ValueNode(None)):
        (entry,) = entries_of(PerRankNode(((0, node),)), ())
        assert entry.node == node


def test_entries_come_by_coordinate_whatever_the_ranks():
    entries = entries_of(saved(MESH, order=[5, 3, 1, 0, 2, 4]), ())
    assert [dict(entry.place.coordinate) for entry in entries] == coordinates(MESH)
    assert [entry.place.rank for entry in entries] == [3, 2, 4, 1, 5, 0]


def test_a_rank_goes_on_with_what_stood_at_its_coordinate():
    entries = entries_of(saved(MESH, order=[5, 3, 1, 0, 2, 4]), ())
    for rank in range(6):
        assert own_entry(entries, place(rank)).node == ValueNode(f"of {coordinates(MESH)[rank]}")


def test_without_a_mesh_on_either_side_a_rank_goes_on_with_its_own():
    by_rank = entries_of(PerRankNode(((0, ValueNode(5)), (1, ValueNode(6)))), ())
    assert own_entry(by_rank, place(1, world_size=2)).node == ValueNode(6)
    with_mesh = entries_of(saved({"dp": 2}, order=[1, 0]), ())
    assert own_entry(with_mesh, RankPlace(rank=1, world_size=2)).place.rank == 1


@pytest.mark.parametrize(
    "here",
    [
        place(0, world_size=7),
        place(0, world_size=5),
        place(0, mesh={"dp": 3, "tp": 2}),
        place(0, mesh={"dp": 2, "cp": 3}),
        place(0, mesh={"dp": 6}),
    ],
    ids=["more ranks", "fewer ranks", "other sizes", "other axes", "fewer axes"],
)
def test_another_world_has_nothing_of_its_own(here):
    assert own_entry(entries_of(saved(MESH), ()), here) is None


def test_ranks_at_one_coordinate_are_told_apart_by_their_number():
    """The mesh of one stage, where several stages have such a mesh."""
    node = PerRankNode(tuple((rank, entry_node({"tp": (rank % 2, 2)}, ValueNode(rank))) for rank in range(4)))
    entries = entries_of(node, ())
    here = [RankPlace(rank=rank, world_size=4, mesh={"tp": 2}, coordinate={"tp": rank % 2}) for rank in range(4)]
    assert [own_entry(entries, at).node.value for at in here] == [0, 1, 2, 3]
    moved = RankPlace(rank=0, world_size=4, mesh={"tp": 2}, coordinate={"tp": 1})
    assert own_entry(entries, moved) is None


def test_a_rank_that_saved_nothing_has_nothing():
    assert own_entry(entries_of(PerRankNode(((0, ValueNode(1)),)), (), 2), RankPlace(rank=1, world_size=2)) is None
    assert own_entry((), RankPlace(rank=0, world_size=1)) is None


@pytest.mark.parametrize("mesh", [{"dp": (2, 2)}, {"dp": (-1, 2)}, {"dp": 1}, {3: (0, 1)}, {"dp": (True, 2)}])
def test_a_place_that_is_none_is_refused(mesh):
    with pytest.raises(InvalidInputError, match="'loader'"):
        axes_of(PerRank(1, mesh=mesh), "loader")


@pytest.mark.parametrize(
    "places",
    [ValueNode(3), DictNode((("dp", ValueNode(1)),)), DictNode((("dp", TupleNode((ValueNode(2), ValueNode(2)))),))],
)
def test_a_damaged_place_is_refused(places):
    node = DictNode(((COORDINATE_KEY, places), (VALUE_KEY, ValueNode(1))))
    with pytest.raises(FormatError, match=r"'x\.0'"):
        entries_of(PerRankNode(((0, node),)), ("x",))
