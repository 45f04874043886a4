"""Every question is asked, tiny and untimed: benchmarks run, check what they load, and count what they say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import bench_reshard
from benchmarks.bench import Bench
from benchmarks.bench_reshard import PAIRS, run_pairs
from benchmarks.case import DCP, OURS, SCALES, TINY
from benchmarks.measure import storage_of
from benchmarks.questions import BY_NAME, QUESTIONS
from benchmarks.runner import Places, run_case

SERVER = {"s3"}
WORLDS = {"memory", "ranks", "reshard", "dedup", "imbalance", "metadata"}
FEW = {
    "memory": {"background save"},
    "ranks": {"load, disk, cold"},
    "s3": {"load"},
    "imbalance": {"4 copies"},
    "async": {"tmpfs"},
    "training": {"tmpfs"},
    "unchanged": {"tmpfs"},
    "save_load": {"save, disk", "load, disk, cold"},
    "copies": {"2 copies"},
    "planning": {"rows, 8 x 16", "second save, 8 x 16", "over ranks: 16 x 64"},
}
"""Cases of questions whose others only differ in where files lie, or that start processes for each."""
NOT_TINY = {("metadata", "4 tensors"), ("dedup", "one state from 3 layouts")}
"""What is counted is exact at any size, but for these: few chunks are mostly their manifest's head, and tensors of one
tile share no tiles."""


def chosen():
    for question in QUESTIONS:
        if question.name == "reshard":
            continue  # all pairs in one world, below
        cases = {case.name: case for case in question.cases(TINY)}
        last_of_curve = {(case.curve, case.sweep[0]): case.name for case in cases.values() if case.sweep is not None}
        for name, case in cases.items():
            if name not in FEW.get(question.name, cases):
                continue
            if case.sweep is not None and name not in last_of_curve.values():
                continue
            marks = [pytest.mark.s3] if question.name in SERVER else []
            marks += [pytest.mark.distributed] if question.name in WORLDS else []
            yield pytest.param(question.name, name, marks=marks, id=f"{question.name}-{name}")


@pytest.fixture
def places(tmp_path):
    return Places(tmp_path, tmp_path)


@pytest.mark.filterwarnings("ignore")  # peers warn of what they do without a process group
@pytest.mark.parametrize(("question", "name"), list(chosen()))
def test_a_question_is_answered(question, name, places):
    asked = BY_NAME[question]
    case = next(case for case in asked.cases(TINY) if case.name == name)
    result = run_case(asked, case, TINY, places)
    assert result.missing == {}
    assert result.sides
    for side, found in result.sides.items():
        assert found.samples, side
        assert all(sample.wall_seconds >= 0 and sample.cpu_seconds >= 0 for sample in found.samples)
    if question not in {"training", "export"}:  # a tiny loop may lose no time, a tiny export need no memory
        assert len(result.ratios) == len(case.ratios)
    for ratio in result.ratios:
        if ratio.exact and (question, name) not in NOT_TINY:
            assert ratio.met is not False, ratio
    assert list(Path(places.disk).iterdir()) == [], "scratch is left behind"


@pytest.mark.distributed
def test_pairs_of_layouts_read_each_byte_once(tmp_path):
    asked = PAIRS[1::2]
    pairs = [[str(tmp_path / str(number)), *pair] for number, pair in enumerate(asked)]
    bench = Bench(dataclasses.replace(TINY, repeats=0), 0, tmp_path)
    for pair, sides in zip(asked, run_pairs(pairs, bench, 8, 200.0), strict=True):
        ours, theirs = sides[OURS][0], sides[DCP][0]
        assert ours.counters["bytes_read"] <= 1.05 * ours.counters["bytes_needed"], pair
        assert theirs.counters["bytes_read"] >= theirs.counters["bytes_needed"], pair


def test_cases_have_names_of_their_own_and_goals_that_can_be_missed():
    for scale in SCALES.values():
        for question in QUESTIONS:
            cases = question.cases(scale)
            assert cases, question.name
            assert len({case.name for case in cases}) == len(cases), question.name
            assert all(ratio.of != ratio.to for case in cases for ratio in case.ratios)


def test_ten_pairs_are_asked():
    assert len(set(PAIRS)) == 10
    assert [case.name for case in bench_reshard.cases(TINY)] == [f"{a} to {b}" for a, b in PAIRS]


def test_folders_say_where_they_lie(tmp_path):
    assert storage_of(tmp_path) in {"disk", "tmpfs"}
    memory = Path("/dev", "shm")
    if memory.is_dir():
        assert storage_of(memory) == "tmpfs"
