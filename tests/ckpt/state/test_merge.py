from __future__ import annotations

import copy
import time

import pytest

from vescale_ckpt.errors import InvalidInputError, MismatchError
from vescale_ckpt.state.merge import fill_per_rank, format_ranks, merge_trees, mismatch, split_per_rank
from vescale_ckpt.state.tree import (
    MAX_DEPTH,
    DictKind,
    DictNode,
    ListNode,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
    get,
    walk,
)

T = TensorNode()


def node(obj, *, union=False):
    match obj:
        case dict():
            return DictNode(tuple((key, node(child, union=union)) for key, child in obj.items()), union)
        case list():
            return ListNode(tuple(node(child, union=union) for child in obj))
        case tuple():
            return TupleNode(tuple(node(child, union=union) for child in obj))
        case DictNode() | ListNode() | TupleNode() | PerRankNode() | TensorNode() | ValueNode():
            return obj
    return ValueNode(obj)


def problems_of(*trees):
    with pytest.raises(MismatchError) as caught:
        merge_trees([(rank, node(tree)) for rank, tree in enumerate(trees)])
    assert all(problem in caught.value.message for problem in caught.value.problems)
    return list(caught.value.problems)


def test_equal_trees_merge_to_the_first():
    trees = [node({"a": [1, (T, None)], "b": {"c": 0.5}}) for _ in range(4)]
    assert merge_trees(list(enumerate(trees))) is trees[0]


def test_one_rank_alone():
    tree = node({"a": 1})
    assert merge_trees([(7, tree)]) is tree


def test_per_rank_values_are_united_by_rank():
    trees = [(r, node({"rng": PerRankNode(((r, ValueNode(r * 10)),)), "x": 1})) for r in (2, 0, 1)]
    merged = merge_trees(trees)
    assert merged == node({"rng": PerRankNode(tuple((r, ValueNode(r * 10)) for r in range(3))), "x": 1})


def test_a_rank_with_two_values_of_its_own_is_refused():
    a = node({"rng": PerRankNode(((0, ValueNode(1)),))})
    b = node({"rng": PerRankNode(((0, ValueNode(2)),))})
    assert merge_trees([(0, a), (1, copy.deepcopy(a))]) == a
    with pytest.raises(MismatchError, match=r"'rng\.0': rank 0 and rank 1 have different values for rank 0"):
        merge_trees([(0, a), (1, b)])


def test_a_union_has_every_key_in_order_of_first_sight():
    first = DictNode((("embed", T), ("l0", T)), union=True)
    last = DictNode((("l1", T), ("embed", T), ("head", T)), union=True)
    assert merge_trees([(0, first), (1, last)]) == DictNode(
        (("embed", T), ("l0", T), ("l1", T), ("head", T)), union=True
    )


def test_inside_a_union_what_several_ranks_hold_must_agree():
    trees = [
        DictNode((("a", ValueNode(1)), ("mine", ValueNode(0)))[: 2 if r == 0 else 1], union=True) for r in range(2)
    ]
    assert merge_trees(list(enumerate(trees))) == trees[0]
    assert problems_of(trees[0], DictNode((("a", ValueNode(2)),), union=True)) == ["'a': rank 0: 1; rank 1: 2"]


def test_order_of_keys_does_not_matter_and_the_first_ranks_stands():
    merged = merge_trees([(0, node({"a": 1, "b": {"x": T}})), (1, node({"b": {"x": T}, "a": 1}))])
    assert merged == node({"a": 1, "b": {"x": T}})


def test_a_missing_key_is_named_with_the_ranks_on_each_side():
    lines = problems_of({"m": {"a": 1, "b": 2}}, {"m": {"a": 1}}, {"m": {"a": 1, "b": 2}}, {"m": {"b": 2}})
    assert lines == [
        "'m': 'a' only on ranks 0-2, not on rank 3",
        "'m': 'b' only on ranks 0, 2-3, not on rank 1",
    ]


def test_many_missing_keys_are_counted_and_not_all_spelled_out():
    (line,) = problems_of({f"k{i}": i for i in range(1000)}, {})
    assert line.startswith("the top of the state: 'k0', 'k1'")
    assert line.endswith("... (1000 keys) only on rank 0, not on rank 1")
    assert len(line) < 200


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        (1, True, "'x': rank 0: 1; rank 1: True"),
        (0.0, -0.0, "'x': rank 0: 0.0; rank 1: -0.0"),
        (1, 1.0, "'x': rank 0: 1; rank 1: 1.0"),
        ("1", 1, "'x': rank 0: '1'; rank 1: 1"),
        (T, 1, "'x': rank 0: a tensor; rank 1: the value 1"),
        ([1], (1,), "'x': rank 0: a list of 1; rank 1: a tuple of 1"),
        ([1, 2], [1], "'x': rank 0: a list of 2; rank 1: a list of 1"),
        ({"a": 1}, None, "'x': rank 0: a dict of 1 key; rank 1: the value None"),
        (PerRankNode(()), 1, "'x': rank 0: a value per rank; rank 1: the value 1"),
    ],
)
def test_what_differs_is_shown(a, b, line):
    assert problems_of({"x": a}, {"x": b}) == [line]


def test_dicts_of_different_kinds_are_different():
    (line,) = problems_of({"d": DictNode((), kind=DictKind.ORDERED)}, {"d": DictNode((), union=True)})
    assert "rank 0: a dict of kind ordered" in line
    assert "rank 1: a dict of kind dict with keys of its own" in line


def test_values_that_look_alike_when_shortened_are_told_apart():
    a, b = "x" * 500 + "a", "x" * 500 + "b"
    (line,) = problems_of({"s": a}, {"s": b}, {"s": a})
    assert line.startswith("'s': ranks 0, 2: 'xxxx")
    assert "rank 1: " in line
    assert "differs from position 500 on: 'b'" in line
    assert len(line) < 400
    (line,) = problems_of({"s": 2**5000}, {"s": 2**5000 + 1}, {"s": 2**5000 + 2})
    assert line.count("rank") == 3


def test_a_thousand_different_values_make_one_short_line():
    lines = problems_of(*[{"seed": rank} for rank in range(1000)])
    assert len(lines) == 1
    assert "(1000 different ones)" in lines[0]
    assert len(lines[0]) < 300


def test_all_disagreements_are_in_one_error():
    a = {"lr": 1.0, "steps": [1, 2], "opt": {"eps": 1e-8, "only": 1}, "t": T}
    b = {"lr": 2.0, "steps": [1, 3], "opt": {"eps": 1e-6}, "t": 5}
    lines = problems_of(a, a, b)
    assert [line.split(":")[0] for line in lines] == ["'lr'", "'steps.1'", "'opt'", "'opt.eps'", "'t'"]
    assert all("ranks 0-1" in line and "rank 2" in line for line in lines)


def test_a_long_list_of_problems_is_cut_in_the_text_only():
    with pytest.raises(MismatchError) as caught:
        merge_trees([(0, node(list(range(500)))), (1, node([-i - 1 for i in range(500)]))])
    assert len(caught.value.problems) == 500
    assert "and 450 more" in caught.value.message
    assert caught.value.message.count("\n") < 60


def test_lists_of_per_rank_length_are_refused():
    """Each rank counts its own parameters: neither one rank's list nor a mixture is everyone's."""
    lines = problems_of(*[{"numels": list(range(n))} for n in (3, 1, 1, 1)])
    assert lines == ["'numels': rank 0: a list of 3; ranks 1-3: a list of 1"]


@pytest.mark.parametrize("trees", [[], [(0, T), (0, T)], [(0, T), (1, node([])), (0, node([]))]])
def test_every_rank_brings_one_tree(trees):
    with pytest.raises(InvalidInputError, match="one tree of every rank"):
        merge_trees(trees)


def deep(levels, value):
    tree = ValueNode(value)
    for _ in range(levels):
        tree = ListNode((tree,))
    return tree


def test_depth_is_bounded():
    assert merge_trees([(0, deep(MAX_DEPTH, 1)), (1, deep(MAX_DEPTH, 1))]) == deep(MAX_DEPTH, 1)
    with pytest.raises(InvalidInputError, match=f"nested more than {MAX_DEPTH}"):
        merge_trees([(0, deep(50_000, 1)), (1, deep(50_000, 2))])
    with pytest.raises(InvalidInputError, match=f"nested more than {MAX_DEPTH}"):
        split_per_rank(deep(50_000, 1))


def test_split_and_fill_are_the_merge_without_the_values():
    trees = [
        (
            r,
            node(
                {"rng": PerRankNode(((r, node({"s": T, "n": r})),)), "l": [PerRankNode(((r, ValueNode(r)),))], "x": 1}
            ),
        )
        for r in range(3)
    ]
    split = [(rank, split_per_rank(tree)) for rank, tree in trees]
    bare = {skeleton for _, (skeleton, _) in split}
    assert bare == {node({"rng": PerRankNode(()), "l": [PerRankNode(())], "x": 1})}
    assert [path for path, _ in split[1][1][1]] == [("rng",), ("l", 0)]
    filled = fill_per_rank(bare.pop(), [(rank, entries) for rank, (_, entries) in split])
    assert filled == merge_trees(trees)


def test_a_tree_without_per_rank_values_is_left_alone():
    tree = node({"a": [1, T]})
    assert split_per_rank(tree) == (tree, ())
    assert split_per_rank(tree)[0] is tree
    assert fill_per_rank(tree, [(0, ()), (1, ())]) is tree


def test_split_takes_a_tree_of_one_rank():
    with pytest.raises(InvalidInputError, match="ranks 0-1"):
        split_per_rank(node({"rng": PerRankNode(((0, T), (1, T)))}))


def test_per_rank_values_must_fit_the_tree():
    tree = node({"rng": PerRankNode(()), "x": 1, "held": PerRankNode(((0, ValueNode(1)),))})
    entries = [
        (0, ((("x",), T), (("held",), ValueNode(1)))),
        (1, ((("rng",), ValueNode(1)), (("rng",), ValueNode(2)), (("gone",), T))),
    ]
    with pytest.raises(MismatchError) as caught:
        fill_per_rank(tree, entries)
    assert sorted(caught.value.problems) == [
        "'gone': a value of rank 1 alone, for which the tree has no place",
        "'held': two entries of rank 0",
        "'rng': two entries of rank 1",
        "'x': a value of rank 0 alone, for which the tree has no place",
    ]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 0, 2], "ranks 0-2"), ([0, 2, 3, 9], "ranks 0, 2-3, 9"), ([5, 5], "rank 5")],
)
def test_ranks_for_people(ranks, text):
    assert format_ranks(ranks) == text


def test_mismatch_counts():
    assert "1 problem:" in mismatch("x", ["a"]).message
    assert mismatch("x", ["a", "b"]).problems == ("a", "b")


def big_tree(rank, num_layers):
    layer = [
        (
            i,
            node(
                {
                    "params": {f"p{j}": T for j in range(16)},
                    "lr": 0.1 * i,
                    "name": f"layer{i}",
                    "betas": (0.9, 0.95),
                    "rng": PerRankNode(((rank, ValueNode(rank)),)),
                },
                union=True,
            ),
        )
        for i in range(num_layers)
    ]
    return DictNode(tuple(layer))


def test_many_nodes_of_eight_ranks_merge_fast():
    trees = [(rank, big_tree(rank, 1000)) for rank in range(8)]
    assert sum(1 for _ in walk(trees[0][1])) > 25_000
    began = time.process_time()
    merged = merge_trees(trees)
    assert time.process_time() - began < 2  # a quarter of a second, on a machine with nothing else to do
    assert get(merged, (77, "rng")) == PerRankNode(tuple((r, ValueNode(r)) for r in range(8)))


def test_shared_trees_of_a_thousand_ranks_are_looked_at_once():
    stages = [big_tree(0, 200), big_tree(0, 200)]
    trees = [(rank, stages[rank % 2]) for rank in range(1000)]
    began = time.process_time()
    assert merge_trees(trees) == stages[0]
    assert time.process_time() - began < 1
