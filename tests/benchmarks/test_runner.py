from __future__ import annotations

import dataclasses

from benchmarks import __main__ as command
from benchmarks import baseline, environment, runner
from benchmarks.case import TINY
from benchmarks.questions import BY_NAME
from benchmarks.results import Run
from benchmarks.runner import Places


def test_a_case_runs_in_a_process_of_its_own_and_its_result_comes_back(tmp_path):
    told = []
    run = runner.run_all(
        [BY_NAME["manifest"]],
        TINY,
        Places(tmp_path, tmp_path),
        only=lambda key: key == "manifest/500 chunks",
        on_result=lambda result, seconds: told.append((result.key, seconds > 0, result.failed)),
    )
    assert told == [("manifest/500 chunks", True, "")]
    assert set(run.results[0].sides) >= {"encode", "open"}
    assert run.results[0].load_average >= 0
    assert list(tmp_path.iterdir()) == []


def test_a_case_that_fails_or_hangs_says_so(tmp_path, monkeypatch):
    question = BY_NAME["manifest"]
    case = question.cases(TINY)[0]
    monkeypatch.setattr(runner.sys, "executable", "/bin/false")
    failed = runner._in_a_child(question, case, TINY, Places(tmp_path, tmp_path))
    assert failed.failed.startswith("ended with 1")
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(slow))
    hasty = dataclasses.replace(case, deadline_seconds=0.3)
    late = runner._in_a_child(question, hasty, TINY, Places(tmp_path, tmp_path))
    assert "took more than" in late.failed


def test_the_environment_says_what_a_result_needs_and_no_host_name():
    described = environment.describe()
    assert len(described["revision"]) in {0, 40}
    assert described["versions"]["torch"]
    assert described["host"]["cpus"] >= 1
    assert described["host"]["memory_bytes"] > 1 << 28
    assert "name" not in described["host"]


def test_the_command_lists_and_shows(tmp_path, capsys, monkeypatch):
    assert command.main(["--list", "--quick"]) == 0
    run = Run(scale="tiny", environment=environment.describe(), results=())
    run.save(tmp_path / "run.json")
    monkeypatch.setattr(baseline, "BASELINE_PATH", tmp_path / "none.json")
    assert command.main(["--from", str(tmp_path / "run.json")]) == 0
