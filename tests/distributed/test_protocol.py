from __future__ import annotations

import pytest

from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def disagreed(tmp_path_factory):
    return launch("protocol.py:disagree", 4, deadline_seconds=120, folder=str(tmp_path_factory.mktemp("protocol")))


@pytest.fixture(scope="module")
def regrouped(tmp_path_factory):
    return launch("protocol.py:regroup", 4, deadline_seconds=120, folder=str(tmp_path_factory.mktemp("groups")))


MISMATCHES = {
    "a key more": ["'sidecar'", "rank 0"],
    "a key less": ["'b'", "rank 3"],
    "dtype": ["'b'", "float32 on rank 0", "float64 on rank 3"],
    "shape": ["'b'", "(3,) on rank 0", "(4,) on rank 3"],
    "value": ["'lr'", "ranks 0-2: 0.5", "rank 3: 0.25"],
    "step": ["5 on rank 0", "6 on rank 3"],
    "base": ["different runs or bases"],
    "load shape": ["rank 3: 'b'", "[4]", "[3]"],
    "load missing": ["rank 3: missing 'more'"],
    "load unexpected": ["'b'"],
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_disagreement_is_told_to_all_ranks_within_seconds(disagreed, case):
    for results in disagreed:
        kind, message, problems, seconds = results[case]
        assert kind == "MismatchError", (kind, message)
        assert seconds < 10
        assert all(word in message for word in MISMATCHES[case]), message
        assert problems or case in {"step", "base"}


@pytest.mark.parametrize(
    ("case", "kind", "word"),
    [
        ("their code", "ValueError", "their own code"),
        ("no memory", "InvalidInputError", "'b'"),
        ("load their code", "ValueError", "their own code"),
    ],
)
def test_a_rank_that_cannot_begin_fails_all_within_seconds(disagreed, case, kind, word):
    for rank, results in enumerate(disagreed):
        found, message, _, seconds = results[case]
        assert seconds < 10
        assert word in message
        assert found == (kind if rank == 3 else "RankFailureError"), (rank, message)


def test_copies_that_differ_are_refused_with_the_key_and_the_ranks(disagreed):
    for rank, results in enumerate(disagreed):
        kind, message, _, seconds = results["copies"]
        assert kind == ("RankFailureError" if rank else "MismatchError")
        assert "'weight': the copies differ" in message
        assert all(f"rank {other}" in message for other in range(4))
        assert seconds < 10


def test_what_is_not_there_is_told_to_all(disagreed):
    for rank, results in enumerate(disagreed):
        kind, message, _, _ = results["load nothing there"]
        assert kind == ("RankFailureError" if rank else "SnapshotNotFoundError")
        assert "'run@99'" in message
        assert "the run has the steps 0, 7" in message


def test_after_all_that_nothing_is_changed_and_all_goes_on(disagreed):
    for results in disagreed:
        assert results["untouched"] == [True]
        assert results["other order"][0] == "", results["other order"]
        assert results["load"][0] == "", results["load"]
        assert results["loaded"] == [True, 0.5]
        assert results["steps"] == [0, 7]


def test_groups_of_any_ranks_meet(regrouped):
    for results in regrouped:
        assert results["saved"][0] < 30
        assert results["odd"] == [{"0": 1, "1": 3}]
    for rank in (0, 1):
        assert regrouped[rank]["of 2 on 2"] == [10 * rank, [0, 1, 2, 3, 4]]


def test_values_per_rank_need_as_many_ranks_or_permission(regrouped):
    for results in regrouped:
        kind, message, problems, _ = results["of 2 on 4"]
        assert kind == "MismatchError"
        assert "of 2 ranks" in message
        assert "ignore=('rng',)" in message
        assert problems
        assert results["untouched"] == [77, [0] * 5]
        assert results["ignored"] == [77, [0, 1, 2, 3, 4]]


def test_a_rank_outside_of_the_group_is_refused(regrouped):
    for rank in (1, 2, 3):
        assert regrouped[rank]["not a member"][0] == "ConfigError"


def test_saving_again_and_again_opens_no_more_and_more_files(regrouped):
    for results in regrouped:
        before, after = results["files"]
        assert after <= before + 8


def test_a_store_that_only_some_ranks_see_is_told_to_all_within_seconds(regrouped):
    """A folder on the disk of one machine, loaded by the ranks of several."""
    for rank, results in enumerate(regrouped):
        kind, message, _, seconds = results["a store on some"]
        assert kind == ("RankFailureError" if rank < 2 else "StoreNotFoundError")
        assert "there is no store at" in message
        assert seconds < 10
