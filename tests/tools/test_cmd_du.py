from __future__ import annotations

import pytest
import torch

import vescale_ckpt as vc


@pytest.fixture
def shared(tmp_path):
    """Make a store of three steps that share 40,000 bytes and have 8,000 each, and a run that shares them too."""
    with vc.open_store(tmp_path / "s") as store:
        with vc.Checkpointer(store, "run") as checkpointer:
            for step in (1, 2, 3):
                tied = torch.arange(2000, dtype=torch.float32) + step
                state = {"a": {"same": torch.arange(5000), "own": tied}, "b": {"tied": tied}}
                checkpointer.save(step, state)
        with vc.Checkpointer(store, "other") as checkpointer:
            checkpointer.save(7, {"same": torch.arange(5000)}, base="run@3")
    return tmp_path / "s"


def test_by_run(command, shared):
    result = command("du", shared)
    assert result.code == 0
    rows = {line.split()[0]: line.split()[1:] for line in result.lines[1:3]}
    assert rows == {"run": ["3", "144", "kB", "64.0", "kB"], "other": ["1", "40.0", "kB", "0", "B"]}
    assert result.lines[3] == (
        "4 snapshots of 184 kB are stored in 64.0 kB: sharing and compression save 120 kB (65.2 %)"
    )
    as_json = command("du", shared, "--json").json
    assert (as_json["tensor_bytes"], as_json["stored_bytes"], as_json["saved_bytes"]) == (184_000, 64_000, 120_000)
    assert as_json["packs"] == as_json["packs_in_use"] == 3
    assert as_json["unneeded_pack_bytes"] == 0
    assert 0 < as_json["sparse_bytes"] < 1000, "footers"


def test_by_step(command, shared):
    snapshots = command("du", shared, "run", "--json").json["snapshots"]
    assert [each["new_bytes"] for each in snapshots] == [48_000, 8_000, 8_000]
    assert [each["own_bytes"] for each in snapshots] == [8_000, 8_000, 8_000]
    assert [each["stored_bytes"] for each in snapshots] == [48_000] * 3
    assert command("du", shared, "run").lines[1].split()[0] == "1"


def test_by_tensor(command, shared):
    result = command("du", shared, "run@2", "--json").json
    assert [(each["name"], each["tensor_bytes"]) for each in result["names"]] == [
        ("a.same", 40_000),
        ("a.own", 8_000),
        ("b.tied", 0),
    ]
    grouped = command("du", shared, "run@2", "--depth", "1", "--json").json["names"]
    assert [(each["name"], each["tensors"], each["stored_bytes"]) for each in grouped] == [
        ("a", 2, 48_000),
        ("b", 1, 0),
    ]
    assert command("du", shared, "run@2").lines[1].split() == ["40.0", "kB", "83.3", "%", "40.0", "kB", "1", "a.same"]


def test_what_nobody_needs_is_told(command, shared):
    with vc.open_store(shared) as store:
        store.delete("run", 3)
    result = command("du", shared, "--json").json
    assert result["unneeded_pack_bytes"] > 8000
    assert "in 1 pack that no snapshot needs (gc)" in command("du", shared).lines[-1]


def test_bad_input(command, shared):
    assert command("du", shared, "nope").code == 10
    assert command("du", shared, "run@9").code == 10
    assert command("du", shared, "run", "--depth", "1").code == 2
    assert command("du", shared, "run@1", "--depth", "0").code == 2
