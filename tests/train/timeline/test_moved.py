import json

import pytest

from tests.distributed.launch import launch
from vescale_train.timeline.clock import Alignment, Offset
from vescale_train.timeline.moved import gather_spans, on_reference
from vescale_train.timeline.perfetto import merge_traces

RANKS = 3


def test_a_span_moves_with_its_clock(span):
    alignment = Alignment().with_measured(Offset(at_ns=0, offset_ns=-500, error_ns=0))
    moved = on_reference(span("forward", 1, 1, 2), alignment)
    assert (moved.start_ns, moved.stop_ns) == (999_500, 1_999_500)


def test_one_process_gathers_its_own(span):
    assert gather_spans([span("forward", 0, 1, 2)]) == [span("forward", 0, 1, 2)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return folder, launch("../train/timeline/world.py:all_of_it", RANKS, deadline_seconds=100, folder=str(folder))


@pytest.mark.distributed
def test_clocks_of_other_ranks_are_found_within_the_error_told(world):
    for rank, result in enumerate(world[1]):
        offset, error = result["offset"]
        assert abs(offset + rank * 3600 * 10**9) <= error + 1
        assert (error == 0) == (rank == 0)


@pytest.mark.distributed
def test_on_one_clock_nobody_leaves_a_barrier_before_all_have_come(world):
    spans, _ = world[1][0]["barrier"]
    error = max(result["barrier"][1] for result in world[1])
    assert [rank for rank, _, _ in spans] == list(range(RANKS))
    assert min(stop for _, _, stop in spans) >= max(start for _, start, _ in spans) - 2 * error
    assert all(result["barrier"][0] == spans for result in world[1])


@pytest.mark.distributed
def test_files_of_all_ranks_become_one(world):
    folder, results = world
    assert [result["program"] for result in results] == [[rank] for rank in range(RANKS)]
    spans = merge_traces(folder.glob("rank-*.json"), folder / "trace.json")
    assert sorted(span.rank for span in spans) == list(range(RANKS))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "meeting" and event["ph"] == "f" for event in events) == RANKS - 1
