import io
from pathlib import Path

import pytest
from checks import Check
from interrupt import Wreck
from report import checks_table, plot_runs, runs_table
from rich.console import Console
from runs import Plan, Run


def run(name, steps, offset=0.0, **more):
    layout = {key: more.pop(key) for key in ("dp", "tp") if key in more}
    events = [{"event": "loss", "step": step, "loss": 4 - step / 10 + offset} for step in steps]
    if steps.start > 1:
        events.insert(0, {"event": "resumed", "step": steps.start - 1, "read": 5_000_000})
    return Run(plan=Plan(name=name, seed=0, **layout), events=events, logits=Path("none"), **more)


@pytest.fixture
def runs():
    killed = run("killed", range(1, 7), dp=2, tp=2, wreck=Wreck(newest_step=4, num_objects=9))
    resumed = [run(f"resumed {name}", range(5, 11), offset=2.5e-7) for name in "ABC"]
    return run("undisturbed", range(1, 11), dp=2, tp=2), killed, resumed


def printed(*what):
    console = Console(width=140, file=io.StringIO())
    console.print(*what)
    return console.file.getvalue()


def test_a_run_knows_its_steps_and_its_distance(runs):
    reference, killed, resumed = runs
    assert (killed.first_step, killed.last_step) == (0, 6)
    assert (resumed[0].first_step, resumed[0].last_step) == (4, 10)
    assert resumed[0].differences(reference) == {step: pytest.approx(2.5e-7) for step in range(5, 11)}


def test_the_table_says_where_runs_start_and_end(runs):
    reference, killed, resumed = runs
    text = printed(runs_table(reference, [killed, *resumed]))
    assert "dp 2 x tp 2" in text
    assert "5.0 MB" in text
    assert "6, killed" in text
    assert "2.5e-07" in text


def test_a_failed_check_stands_out():
    checks = [Check(claim="good", passed=True, found=""), Check(claim="bad [x]", passed=False, found="")]
    lines = printed(checks_table(checks)).splitlines()
    assert any(line.split() == ["ok", "good"] for line in lines)
    assert any(line.split() == ["FAILED", "bad", "[x]"] for line in lines)


def test_the_picture_is_drawn(runs, tmp_path):
    reference, killed, resumed = runs
    plot_runs(reference, killed, resumed, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
