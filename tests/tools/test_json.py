"""Every command with ``--json``: one object on standard output, with the fields that programs rely on."""

from __future__ import annotations

import pytest
import torch

import vescale_ckpt as vc
from vescale_tools.cli import COMMANDS

RUN = "gpt [0]*"
FIELDS = {
    "ls": {"url", "runs"},
    "show": {
        "snapshot",
        "version",
        "created_seconds",
        "created",
        "world_size",
        "writer",
        "metadata",
        "tensors",
        "values",
        "totals",
    },
    "cat": {"snapshot", "name", "dtype", "shape", "offset", "values"},
    "diff": {"a", "b", "same", "bytes_read", "counts", "tensors", "values"},
    "explain": {
        "snapshot",
        "mesh",
        "stored_bytes",
        "read_bytes",
        "exchanged_bytes",
        "imbalance",
        "ranks",
        "tensors",
    },
    "du": {
        "url",
        "runs",
        "tensor_bytes",
        "stored_bytes",
        "saved_bytes",
        "packs_in_use",
        "packs",
        "pack_bytes",
        "unneeded_pack_bytes",
        "sparse_bytes",
    },
    "verify": {"ok", "snapshots"},
    "fsck": {
        "url",
        "dry_run",
        "ok",
        "snapshots",
        "packs",
        "chunks",
        "bytes_read",
        "findings",
        "orphans",
        "repaired",
        "failed",
        "ok_after",
        "recovered",
    },
    "doctor": {"url", "ok", "dry_run", "capabilities", "checks", "latencies"},
    "report": {"run", "file", "bytes", "dry_run", "snapshots", "newest", "loss", "phases", "mesh"},
    "tag": {"run", "tag", "step", "version", "dry_run"},
    "rm": {"removed", "would_remove", "dry_run"},
    "prune": {"dry_run", "runs"},
    "gc": {"dry_run", "grace_seconds", "refs", "tags", "live", "plan", "done", "repack"},
    "repack": {"dry_run", "grace_seconds", "refs", "tags", "live", "plan", "done", "repack"},
    "mirror": {
        "source",
        "target",
        "dry_run",
        "plan",
        "snapshots",
        "tags",
        "packs",
        "bytes",
        "conflicts",
        "held_back",
        "failed",
        "whole",
        "seconds",
    },
    "completion": {"shell", "script"},
}
ARGUMENTS = {
    "ls": ["URL"],
    "show": ["URL", f"{RUN}@10"],
    "cat": ["URL", f"{RUN}@10", "model.ids"],
    "diff": ["URL", f"{RUN}@10", f"{RUN}@20"],
    "explain": ["URL", f"{RUN}@10", "--mesh", "dp=2"],
    "du": ["URL"],
    "verify": ["URL"],
    "fsck": ["URL"],
    "doctor": ["URL", "--dry-run"],
    "report": ["URL", RUN, "-o", "TMP/page.html", "--dry-run"],
    "tag": ["URL", f"{RUN}@10", "best", "--dry-run"],
    "rm": ["URL", f"{RUN}@10", "--dry-run"],
    "prune": ["URL", RUN, "--keep-last", "1", "--dry-run"],
    "gc": ["URL", "--dry-run"],
    "repack": ["URL", "--dry-run"],
    "mirror": ["URL", "TMP/copy", "--dry-run"],
    "completion": ["bash"],
}
ELSEWHERE = {"export", "convert"}
"""Whose fields their own tests pin."""


def test_every_command_is_here():
    assert FIELDS.keys() == ARGUMENTS.keys()
    assert FIELDS.keys() | ELSEWHERE == COMMANDS.keys()


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_one_object_with_these_fields(command, url, tmp_path, name):
    places = {"URL": str(url), "TMP": str(tmp_path)}
    arguments = [each.replace("TMP", places["TMP"]) if each != "URL" else places["URL"] for each in ARGUMENTS[name]]
    result = command(name, *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.json.keys() == FIELDS[name]


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {"completion", "mirror"}))
def test_a_place_without_a_store_is_one_object_too(command, tmp_path, name):
    arguments = [each.replace("TMP", str(tmp_path)) if each != "URL" else tmp_path / "none" for each in ARGUMENTS[name]]
    result = command(name, *arguments, "--json")
    assert result.code == 10
    assert result.json["error"].keys() == {"kind", "message", "context"}
    assert not (tmp_path / "none").exists()


def test_a_dry_run_leaves_every_byte_as_it_is(command, url, tmp_path):
    with vc.open_store(url) as store:
        store.delete("other", 0)
    before = {path: path.read_bytes() for path in url.rglob("*") if path.is_file()}
    for name, arguments in ARGUMENTS.items():
        if "--dry-run" in arguments:
            here = [each.replace("TMP", str(tmp_path)) if each != "URL" else url for each in arguments]
            command(name, *here)
    command("fsck", url, "--repair", "--dry-run")
    assert before == {path: path.read_bytes() for path in url.rglob("*") if path.is_file()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_numbers_that_json_has_not_are_texts(command, tmp_path):
    with vc.open_store(tmp_path / "s") as store, vc.Checkpointer(store, "r") as checkpointer:
        checkpointer.save(1, {"w": torch.tensor([float("inf")])})
        checkpointer.save(2, {"w": torch.tensor([0.0])})
    assert command("cat", tmp_path / "s", "r@1", "w", "--json").json["values"] == ["inf"]
    assert command("diff", tmp_path / "s", "r@1", "r@2", "--json").json["tensors"][0]["compared"]["max_abs"] == "inf"
