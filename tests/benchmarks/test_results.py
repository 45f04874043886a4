from __future__ import annotations

import json

import pytest

from benchmarks import baseline, report, tables, text
from benchmarks.bench import Bench
from benchmarks.case import OURS, TINY, Case, Question, Ratio
from benchmarks.measure import Sample, measure
from benchmarks.results import CaseResult, Run, conclude
from benchmarks.runner import Places, run_case


def sample(wall=1.0, cpu=1.0, **counters):
    return Sample(wall_seconds=wall, cpu_seconds=cpu, counters=counters)


def nothing(case, bench):
    pass


def question(run=nothing, **case):
    asked = Case(name="a case", **case)
    return Question(name="save_load", title="Title", text="", cases=lambda _: (asked,), run=run, columns=("requests",))


RATIO = Ratio(name="wall / peer", of=(OURS, "wall_seconds"), to=("peer", "wall_seconds"), at_most=0.5)


def result(ours=(1.0, 2.0, 4.0), peer=(8.0, 4.0, 2.0), **case):
    bench = Bench(TINY, 3, None)
    for wall in ours:
        bench.add(OURS, sample(wall, requests=7))
    for wall in peer:
        bench.add("peer", sample(wall))
    asked = question(**{"ratios": (RATIO,), **case})
    return conclude(asked, asked.cases(TINY)[0], bench)


def run_of(*results, scale="tiny"):
    environment = {
        "revision": "0" * 40,
        "dirty": False,
        "when": "2026-01-01T00:00:00+00:00",
        "python": "3.11",
        "versions": {"torch": "2"},
        "missing": [],
        "host": {"cpus": 2, "memory_bytes": 1 << 30, "machine": "m", "cpu": "", "system": "Linux 6"},
    }
    return Run(scale=scale, environment=environment, results=tuple(results))


def test_a_ratio_is_of_medians_and_says_whether_its_goal_is_met():
    found = result()
    assert [(r.value, r.met) for r in found.ratios] == [(0.5, True)]
    assert not result(ours=(3.0, 3.0, 3.0)).ratios[0].met


def test_a_ratio_without_a_value_is_noted_and_not_made_up():
    found = result(ratios=(Ratio(name="x", of=(OURS, "requests"), to=("peer", "requests")),))
    assert found.ratios == ()
    assert "no value for 'x'" in found.notes[0]
    assert result(peer=(0.0,)).ratios == ()


def test_the_first_turn_is_kept_apart():
    bench = Bench(TINY, 2, None)
    bench.compare({OURS: lambda turn: sample(wall=100.0 if turn == 0 else 1.0)})
    asked = question(ratios=(Ratio(name="r", of=(OURS, "first.wall_seconds"), to=(OURS, "wall_seconds")),))
    found = conclude(asked, asked.cases(TINY)[0], bench)
    assert len(found.sides[OURS].samples) == 2
    assert found.ratios[0].value == 100.0


def test_sides_take_turns_and_a_peer_that_fails_is_left_out_with_the_reason():
    order = []

    def act(name, fail=False):
        def turn(number):
            order.append((number, name))
            if fail:
                raise OSError("no such thing")
            return sample()

        return turn

    bench = Bench(TINY, 2, None)
    bench.compare({"a": act("a"), "b": act("b"), "bad": act("bad", fail=True)})
    assert order == [(0, "a"), (0, "b"), (0, "bad"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert bench.missing == {"bad": "OSError: no such thing"}
    with pytest.raises(OSError, match="no such thing"):
        bench.compare({OURS: act(OURS, fail=True)})


def test_results_come_back_from_json(tmp_path):
    run = run_of(
        result(sweep=("ranks", 8), curve="c"), CaseResult(question="x", case="y", storage="none", failed="why")
    )
    run.save(tmp_path / "run.json")
    assert Run.open(tmp_path / "run.json") == run
    document = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(document | {"schema": 0}))
    with pytest.raises(ValueError, match="schema"):
        Run.open(tmp_path / "run.json")


def test_a_baseline_tells_what_got_worse(tmp_path):
    path = tmp_path / "baseline.json"
    assert baseline.compare(run_of(result()), path) == []
    baseline.store(run_of(result()), path)
    assert [c.worse for c in baseline.compare(run_of(result()), path)] == [False]
    worse = run_of(result(ours=(2.0, 4.0, 8.0)))
    assert [(c.before, c.now, c.worse) for c in baseline.compare(worse, path)] == [(0.5, 1.0, True)]
    assert baseline.compare(run_of(result(), scale="full"), path) == []
    assert "seconds" not in path.read_text()


def test_what_is_counted_may_not_grow_at_all(tmp_path):
    def counted(value):
        ratio = Ratio(name="bytes", of=(OURS, "requests"), to=("peer", "wall_seconds"), exact=True)
        return run_of(result(ratios=(ratio,), peer=(7 / value,)))

    baseline.store(counted(1.0), tmp_path / "b.json")
    assert not baseline.compare(counted(1.004), tmp_path / "b.json")[0].worse
    assert baseline.compare(counted(1.02), tmp_path / "b.json")[0].worse


def test_tables_show_medians_spreads_counters_and_goals():
    found = [result()]
    rows = tables.measurements(question(), found)
    assert rows.titles == ("case", "side", "wall, median (low to high)", "CPU", "requests")
    assert rows.cells[0] == ("a case", OURS, "2.00 s (1.00 s to 4.00 s)", "1.00 s", "7")
    assert rows.cells[1] == ("", "peer", "4.00 s (2.00 s to 8.00 s)", "1.00 s", "")
    assert tables.ratios(found).cells == (("a case", "wall / peer", "0.5", "<= 0.5 met"),)
    assert tables.ratios(found).markdown().splitlines()[1] == "| --- | --- | ---: | --- |"


@pytest.mark.parametrize(("power", "close"), [(1.0, 0.01), (2.0, 0.01)])
def test_curves_tell_how_cost_grows(power, close):
    points = []
    for value in (10, 100, 1000, 10_000):
        bench = Bench(TINY, 1, None)
        bench.add(OURS, sample(cpu=1e-6 * value**power))
        asked = question(sweep=("ranks", value), curve="c")
        points.append(conclude(asked, asked.cases(TINY)[0], bench))
    [curve] = tables.curves(points)
    assert curve.exponent == pytest.approx(power, abs=close)
    assert tables.growth([curve]).cells[0][2] == "10 to 10,000 ranks"


def test_the_document_keeps_its_prose_and_gets_its_tables():
    document = "# P\n\nprose\n\n<!-- benchmarks: save_load -->\nold\n<!-- end -->\n\nmore\n"
    filled = report.filled(document, run_of(result()))
    assert filled.startswith("# P\n\nprose\n")
    assert filled.endswith("<!-- end -->\n\nmore\n")
    assert "| a case | vescale-ckpt |" in filled
    assert "old" not in filled
    assert report.filled(filled, run_of(result())) == filled
    assert report.filled(document, run_of()) == document
    with pytest.raises(ValueError, match="no question is called 'nothing'"):
        report.filled("<!-- benchmarks: nothing -->\n<!-- end -->", run_of())


def test_the_document_has_a_block_for_every_question():
    text = report.DOCUMENT.read_text()
    for name in ("environment", "goals", *report.BY_NAME):
        assert f"<!-- benchmarks: {name} -->\n" in text, name


def test_curves_are_drawn(tmp_path):
    results = [result(sweep=("ranks", value), curve="c") for value in (1, 10)]
    [path] = report.draw(run_of(*results), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_measuring_counts_time_and_bytes(tmp_path):
    with measure() as taken:
        (tmp_path / "f").write_bytes(b"x" * 100_000)
        sum(range(100_000))
        taken.counters["n"] = 3
    assert taken.sample.file_write_bytes >= 100_000
    assert taken.sample.wall_seconds > 0
    assert taken.sample.quantity("n") == 3
    assert taken.sample.has("peak_bytes")
    assert not taken.sample.has("counters")
    with pytest.raises(KeyError):
        taken.sample.quantity("absent")


def test_samples_of_ranks_become_one():
    merged = Sample.over_ranks([sample(1.0, 2.0, n=1), sample(3.0, 4.0, n=2, m=5)])
    assert (merged.wall_seconds, merged.cpu_seconds, merged.counters) == (3.0, 6.0, {"n": 3, "m": 5})


def test_a_case_gets_a_folder_of_its_own_that_is_removed(tmp_path):
    seen = []

    def run(case, bench):
        (bench.folder / "file").write_text("x")
        seen.append(bench.folder)
        bench.add(OURS, sample())

    asked = question(run)
    run_case(asked, asked.cases(TINY)[0], TINY, Places(tmp_path, tmp_path))
    assert seen[0].parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.seconds(0.00012), "120 us"),
        (text.seconds(0.5), "500 ms"),
        (text.seconds(12.345), "12.35 s"),
        (text.size(1234), "1.23 kB"),
        (text.size(999_600), "1000 kB"),
        (text.size(1.54e9), "1.54 GB"),
        (text.quantity("bytes_read", 12), "12 B"),
        (text.quantity("stall_seconds", 0.01), "10 ms"),
        (text.quantity("requests", 12345.0), "12,345"),
    ],
)
def test_numbers_are_written_for_people(shown, expected):
    assert shown == expected
