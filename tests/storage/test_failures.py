from __future__ import annotations

from vescale_storage.errors import StorageError
from vescale_storage.failures import aborted, format_ranks, printable, silent
from vescale_storage.fragment import AbortRecord

TXN = "ab" * 16


def record(rank, message="broken", kind="no_space", failures=None):
    return AbortRecord(TXN, rank, kind, message, failures or {})


def test_ranks_are_written_as_runs_of_neighbours():
    assert format_ranks([]) == ""
    assert format_ranks([3]) == "3"
    assert format_ranks({7, 0, 1, 2, 3}) == "0-3, 7"
    assert format_ranks(range(4096)) == "0-4095"
    assert format_ranks(range(0, 4096, 2)).endswith("36, 38, ...")


def test_an_abort_names_rank_kind_message_and_phase():
    error = aborted(TXN, "collect", 0, {5: record(5)})
    assert error.failures == {5: "no_space: broken"}
    assert "rank 5: no_space: broken" in str(error)
    assert "'collect'" in str(error)
    assert TXN in str(error)
    assert error.context == {"phase": "collect", "transaction": TXN}


def test_what_a_rank_says_of_itself_counts_more_than_what_is_said_of_it():
    head = record(0, "rank 5 and 6 failed", "rank_failure", {5: "hearsay", 6: "silent"})
    error = aborted(TXN, "wait", 0, {0: head, 5: record(5)})
    assert error.failures == {5: "no_space: broken", 6: "silent"}


def test_a_coordinator_that_failed_itself_is_named():
    error = aborted(TXN, "wait", 0, {0: record(0, "two owners of one box", "corruption")})
    assert error.failures == {0: "corruption: two owners of one box"}


def test_a_record_that_cannot_be_read_is_an_abort_all_the_same():
    error = aborted(TXN, "wait", 0, {3: None})
    assert error.failures == {3: "aborted; its record cannot be read"}
    told = aborted(TXN, "wait", 0, {0: record(0, failures={3: "silent"}), 3: None})
    assert told.failures == {3: "silent"}


def test_many_failures_are_all_kept_and_few_spelled():
    error = aborted(TXN, "wait", 0, {rank: record(rank) for rank in range(1, 50)})
    assert len(error.failures) == 49
    assert "rank 3: " in str(error)
    assert "rank 4: " not in str(error)
    assert "and 46 more ranks" in str(error)


def test_silence_names_the_ranks_the_phase_and_the_last_error_of_the_storage():
    error = silent(TXN, "collect", {3, 1, 2}, 8, seconds=30, missing="fragment", cause=StorageError("connection reset"))
    assert set(error.failures) == {1, 2, 3}
    for part in ("30 s", "'collect'", TXN, "ranks 1-3 of 8", "connection reset"):
        assert part in str(error)
    hint = silent(TXN, "wait", {0}, 8, seconds=30, missing="ref", without_fragment={5, 6}, cause=None)
    assert hint.failures.keys() == {0, 5, 6}
    assert "nothing from rank 0 of 8; no fragment from ranks 5-6; look" in str(hint)
    assert "storage" not in str(silent(TXN, "collect", {3}, 8, seconds=1, missing="fragment", cause=TimeoutError()))


def test_nothing_from_a_store_moves_the_cursor():
    assert printable("a\x1b[2Jb\u202ec\nd") == "a\\x1b[2Jb\\u202ec\nd"
    error = aborted(TXN, "wait", 0, {1: record(1, "\x1b[2J", "\x07")})
    assert "\x1b" not in str(error)
    assert "\x07" not in error.failures[1]
