from __future__ import annotations

import pytest
import torch

from tests.distributed.threads import all_well, run_ranks
from vescale_ckpt.adapters.capture import capture
from vescale_ckpt.errors import MismatchError, RankFailureError
from vescale_ckpt.plan.holdings import Holdings, LeafSpec
from vescale_ckpt.saving.agree import NO_STEP, Intent, PlanCache, Prepared, agree, plan_of
from vescale_ckpt.state.build import build_tree
from vescale_ckpt.state.merge import split_per_rank
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_ckpt.state.tree import DictNode, TensorNode
from vescale_storage.digest import digest


def prepared(state, rank):
    captured = capture(state, rank=rank)
    return Prepared(captured, *split_per_rank(captured.tree))


def refuse(steps):
    raise RankFailureError(f"earlier {sorted(steps)}")


def settle(group, state, cache=None, *, step=1, run="run", bases=(), failed_step=NO_STEP):
    what = state if isinstance(state, Exception) else prepared(state, group.rank)
    intent = Intent(run, step, bases, failed_step)
    return agree(group, what, cache or PlanCache(), intent=intent, on_failed=refuse)


def rows(rank, world_size, shape=(12, 2)):
    each = shape[0] // world_size
    return ShardedView(shape, torch.float32, [((rank * each, 0), torch.zeros(each, shape[1]))])


def test_all_ranks_settle_the_same_transaction_and_make_the_same_plan():
    agreements = all_well(run_ranks(3, lambda g: settle(g, {"w": rows(g.rank, 3), "c": torch.ones(2)})))
    assert len({a.transaction for a in agreements}) == 1
    assert len(agreements[0].transaction) == 32
    assert len({a.plan_key for a in agreements}) == 1
    assert len({a.plan.tensors for a in agreements}) == 1
    assert not any(a.tree_differs for a in agreements)
    assert sum(len(a.plan.regions) for a in agreements) == 4


def test_each_save_has_a_transaction_of_its_own():
    def body(group):
        cache = PlanCache()
        return [settle(group, {"c": torch.ones(2)}, cache, step=step).transaction for step in range(3)]

    first, second = all_well(run_ranks(2, body))
    assert first == second
    assert len(set(first)) == 3


def test_a_known_plan_costs_one_collective_and_a_change_anywhere_a_new_one():
    def body(group):
        cache, counts, keys = PlanCache(), [], []
        states = [
            {"w": rows(group.rank, 2), "lr": 1},
            {"w": rows(group.rank, 2), "lr": 2},
            {"w": rows(group.rank or 0, 2, (4, 2)), "lr": 2},
            {"w": rows(group.rank, 2, (4, 2)), "lr": 2},
        ]
        for state in states:
            before = group.num_collectives
            keys.append(settle(group, state, cache).plan_key)
            counts.append(group.num_collectives - before)
        return counts, keys

    for counts, keys in all_well(run_ranks(2, body)):
        assert counts[1] == counts[3] == 1
        assert counts[0] == counts[2] > 1
        assert keys[0] == keys[1] != keys[2] == keys[3]


def test_a_rank_that_forgot_the_plan_makes_all_exchange_again():
    def body(group):
        cache = PlanCache()
        settle(group, {"c": torch.ones(2)}, cache)
        before = group.num_collectives
        settle(group, {"c": torch.ones(2)}, PlanCache() if group.rank == 1 else cache)
        return group.num_collectives - before

    counts = all_well(run_ranks(3, body))
    assert len(set(counts)) == 1
    assert counts[0] > 1


def test_trees_may_differ_where_they_can_be_united():
    model = {rank: torch.nn.ModuleDict({str(rank): torch.nn.Linear(1, 1)}) for rank in range(3)}

    def body(group):
        cache = PlanCache()
        return [settle(group, {"m": model[group.rank]}, cache).tree_differs for _ in range(2)]

    assert all_well(run_ranks(3, body)) == [[False, False], [True, True], [True, True]]


def test_values_per_rank_are_no_difference():
    def body(group):
        return settle(group, {"r": PerRank(group.rank)}).tree_differs

    assert all_well(run_ranks(2, body)) == [False, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 2}, "1 on rank 0, 1 on rank 1, 2 on rank 2"),
        ({"run": "other"}, "different runs or bases"),
        ({"bases": ("b@1",)}, "different runs or bases"),
    ],
)
def test_ranks_with_different_intents_are_told(change, words):
    outcomes = run_ranks(3, lambda g: settle(g, {"c": torch.ones(1)}, **(change if g.rank == 2 else {})))
    for outcome in outcomes:
        assert isinstance(outcome, MismatchError)
        assert words in str(outcome)


def test_a_plain_value_that_starts_to_differ_is_told_although_the_plan_is_known():
    def body(group):
        cache = PlanCache()
        settle(group, {"c": torch.ones(1), "lr": 1.0}, cache)
        settle(group, {"c": torch.ones(1), "lr": 1.0 + group.rank}, cache, step=2)

    for outcome in run_ranks(2, body):
        assert isinstance(outcome, MismatchError)
        assert "'lr': rank 0: 1.0; rank 1: 2.0" in str(outcome)


def test_after_a_refusal_the_old_plan_is_good_for_the_old_state():
    def body(group):
        cache = PlanCache()
        first = settle(group, {"c": torch.ones(2)}, cache)
        with pytest.raises(MismatchError):
            settle(group, {"c": torch.ones(2 + group.rank)}, cache)
        before = group.num_collectives
        again = settle(group, {"c": torch.ones(2)}, cache)
        return first.plan_key == again.plan_key, group.num_collectives - before

    assert all_well(run_ranks(2, body)) == [(True, 1), (True, 1)]


@pytest.mark.parametrize("error", [MismatchError("cannot tell"), ValueError("their code")])
def test_a_rank_that_could_not_prepare_fails_all(error):
    outcomes = run_ranks(3, lambda g: settle(g, error if g.rank == 1 else {"c": torch.ones(1)}))
    assert outcomes[1] is error
    for rank in (0, 2):
        assert isinstance(outcomes[rank], RankFailureError)
        assert str(error) in str(outcomes[rank])


def test_a_failure_that_one_rank_has_not_seen_is_brought_to_all():
    outcomes = run_ranks(3, lambda g: settle(g, {"c": torch.ones(1)}, failed_step=7 if g.rank == 2 else NO_STEP))
    assert [str(outcome) for outcome in outcomes] == ["earlier [7]"] * 3


def test_tables_that_differ_are_united_by_path():
    both = [LeafSpec((name,), "float32", 4, (2,), "tensor", "replicated") for name in "ab"]
    boxes = [capture({"x": torch.ones(2)}, rank=0).leaves[0].pieces[0].box]
    held = [Holdings.of([(both[0], boxes)]), Holdings.of([(both[1], boxes), (both[0], boxes)])]
    tables = [h.table_bytes() for h in held]
    plan = plan_of([digest(t) for t in tables], tables, [h.box_bytes() for h in held], rank=1)
    assert [record.path for record in plan.tensors] == [("a",), ("b",)]
    assert plan.compared == (0,)
    assert plan.bytes_by_rank.sum() == 16


def test_the_tree_that_is_compared_is_that_of_the_state():
    state = {"c": torch.ones(1)}
    assert prepared(state, 0).tree == DictNode((("c", TensorNode()),))
    assert build_tree({"a": 1}, lambda *_: None) == prepared({"a": 1}, 0).tree
