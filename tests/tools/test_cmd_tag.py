from __future__ import annotations

import pytest

RUN = "gpt [0]*"


def tags(command, url):
    return {snapshot["step"]: snapshot["tags"] for snapshot in command("ls", url, RUN, "--json").json["snapshots"]}


def test_a_tag_names_a_snapshot(command, url):
    result = command("tag", url, f"{RUN}@10", "first")
    assert (result.code, result.out) == (0, f"{RUN}@first is now step 10\n")
    assert tags(command, url) == {10: ["first"], 20: []}
    assert command("tag", url, f"{RUN}@10", "first").out == f"{RUN}@first is already step 10\n"


def test_the_newest_and_another_tag_can_be_named(command, url):
    assert command("tag", url, RUN, "now", "--json").json == {
        "run": RUN,
        "tag": "now",
        "step": 20,
        "version": 1,
        "dry_run": False,
    }
    command("tag", url, f"{RUN}@now", "also")
    assert tags(command, url) == {10: [], 20: ["also", "now"]}


def test_a_tag_never_moves(command, url):
    command("tag", url, f"{RUN}@10", "first")
    for more in ([], ["--dry-run"]):
        result = command("tag", url, f"{RUN}@20", "first", *more)
        assert result.code == 11
        assert "tags do not move" in result.err
    assert tags(command, url) == {10: ["first"], 20: []}


def test_a_dry_run_sets_nothing(command, url):
    result = command("tag", url, f"{RUN}@10", "first", "--dry-run")
    assert (result.code, result.out) == (0, f"{RUN}@first would be step 10\n")
    assert tags(command, url) == {10: [], 20: []}


def test_delete(command, url):
    command("tag", url, f"{RUN}@10", "first")
    assert command("tag", url, f"{RUN}@first", "--delete", "--dry-run").out == f"would delete the tag {RUN}@first\n"
    assert tags(command, url) == {10: ["first"], 20: []}
    assert command("tag", url, f"{RUN}@first", "--delete", "--json").json["deleted"] is True
    assert tags(command, url) == {10: [], 20: []}
    assert command("tag", url, f"{RUN}@first", "--delete").code == 10
    assert command("tag", url, f"{RUN}@first", "--delete", "--dry-run").code == 10


@pytest.mark.parametrize(
    "arguments",
    [[f"{RUN}@10"], [f"{RUN}@10", "x", "--delete"], [f"{RUN}@10", "--delete"], [RUN, "--delete"], [f"{RUN}@10", "123"]],
)
def test_usage(command, url, arguments):
    result = command("tag", url, *arguments)
    assert (result.code, result.out) == (2, "")


def test_what_is_not_there(command, url):
    assert command("tag", url, f"{RUN}@11", "x").code == 10
