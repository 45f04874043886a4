from __future__ import annotations

import json

import pytest
import torch

import vescale_ckpt as vc


@pytest.fixture
def saved(tmp_path):
    state = {"model": {"l0.w": torch.randn(64, 32), "l1.w": torch.randn(64, 32), "b": torch.randn(6)}}
    with vc.open_store(tmp_path / "s") as store, vc.Checkpointer(store, "run") as checkpointer:
        checkpointer.save(1, state)
    return tmp_path / "s"


def test_without_a_plan(command, saved):
    result = command("explain", saved, "run@1", "--mesh", "dp=2,tp=4")
    assert (result.code, result.err) == (0, "")
    assert result.lines[0].split() == ["rank", "at", "holds", "needs", "reads", "chunks", "is", "handed"]
    assert result.lines[1].split()[:5] == ["0", "dp", "0", "tp", "0"]
    assert len(result.lines) == 10
    assert result.lines[-1].startswith("8 ranks (dp 2, tp 4) need 16.4 kB and read 16.4 kB, each chunk once")
    found = command("explain", saved, "run", "--mesh", "dp=2,tp=4", "--json").json
    assert found["snapshot"] == "run@1"
    assert found["mesh"] == {"dp": 2, "tp": 4}
    assert [rank["held_bytes"] for rank in found["ranks"]] == [2 * 16 * 32 * 4 + 24] * 8


def test_a_plan(command, saved, tmp_path):
    plan = {
        r"model\.l0\.w": {"pp": "only(0)", "tp": "Shard(1)"},
        r"model\.l1\..*": {"pp": "only(1)", "tp": "S(0)"},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    arguments = ("explain", saved, "run@1", "--mesh", "pp=2,tp=2", "--plan", tmp_path / "plan.json")
    found = command(*arguments, "--tensor", "model.l0.w", "--json").json
    assert [rank["held_bytes"] for rank in found["ranks"]] == [4096 + 24] * 4
    assert found["tensors"]["model.l0.w"] == [
        [{"offset": [0, 0], "shape": [64, 16]}],
        [{"offset": [0, 16], "shape": [64, 16]}],
        [],
        [],
    ]
    out = command(*arguments, "--tensor", "model.l0.w", "--tensor", "model.b").out
    assert "[0:64, 16:32]  1" in out
    assert "nothing        2, 3" in out
    assert "[0:6]    0, 1, 2, 3" in out


@pytest.mark.parametrize(
    ("plan", "mesh", "text"),
    [
        ({"nothing": {"tp": "R"}}, "tp=2", "no tensor is left"),
        ({".*": {"ep": "R"}}, "tp=2", "names"),
        ({".*": {"tp": "only(2)"}}, "tp=2", "no such place"),
        ({".*": {"tp": "S(3)"}}, "tp=2", "shape"),
        (None, "pp=2", "--plan"),
    ],
)
def test_what_does_not_fit(command, saved, tmp_path, plan, mesh, text):
    options = []
    if plan is not None:
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        options = ["--plan", tmp_path / "plan.json"]
    result = command("explain", saved, "run@1", "--mesh", mesh, *options)
    assert (result.code, result.out) == (2, "")
    assert text in result.err


def test_bad_input(command, saved):
    assert command("explain", saved, "run@1").code == 2
    assert command("explain", saved, "run@1", "--mesh", "2x2").code == 2
    assert command("explain", saved, "run@2", "--mesh", "dp=2").code == 10
    assert command("explain", saved, "run@1", "--mesh", "dp=2", "--tensor", "nope").code == 10
    assert command("explain", saved, "run@1", "--mesh", "dp=1000000").code == 2


def test_many_ranks_are_cut_short(command, saved):
    result = command("explain", saved, "run@1", "--mesh", "dp=40")
    assert "and 8 more; --all shows them" in result.out
    assert len(command("explain", saved, "run@1", "--mesh", "dp=40", "--all").lines) == 42
