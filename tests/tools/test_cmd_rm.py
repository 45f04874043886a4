from __future__ import annotations

import pytest

import vescale_ckpt as vc

RUN = "gpt [0]*"


def steps(command, url):
    return [snapshot["step"] for snapshot in command("ls", url, RUN, "--json").json["snapshots"]]


def test_a_snapshot_is_removed_and_the_other_stays_whole(command, url):
    result = command("rm", url, f"{RUN}@10")
    assert result.code == 0
    assert result.lines[0] == f"removed {RUN}@10"
    assert steps(command, url) == [20]
    assert command("verify", url).code == 0


def test_all_versions_go(command, url):
    with vc.open_store(url) as store, vc.Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(10, {"w": 1})
    command("rm", url, f"{RUN}@10")
    assert command("show", url, f"{RUN}@10").code == 10


def test_a_dry_run_removes_nothing(command, url):
    result = command("rm", url, f"{RUN}@10", f"{RUN}@20", "--dry-run")
    assert result.lines[:2] == [f"would remove {RUN}@10", f"would remove {RUN}@20"]
    assert steps(command, url) == [10, 20]
    assert command("rm", url, f"{RUN}@10", "--dry-run", "--json").json == {
        "removed": [],
        "would_remove": [f"{RUN}@10"],
        "dry_run": True,
    }


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_all_or_nothing(command, url, more):
    command("tag", url, f"{RUN}@20", "best")
    result = command("rm", url, f"{RUN}@10", f"{RUN}@20", *more)
    assert (result.code, result.out) == (11, "")
    assert "best" in result.err
    result = command("rm", url, f"{RUN}@10", f"{RUN}@11", *more)
    assert (result.code, result.out) == (10, "")
    assert steps(command, url) == [10, 20]


@pytest.mark.parametrize("name", [RUN, f"{RUN}@best", f"{RUN}@", "@10"])
def test_only_a_step_by_its_number(command, url, name):
    assert command("rm", url, name).code == 2
    assert steps(command, url) == [10, 20]


def test_the_same_twice_is_once(command, url):
    result = command("rm", url, f"{RUN}@10", f"{RUN}@010", "--json")
    assert result.json["removed"] == [f"{RUN}@10"]
