from __future__ import annotations

import pytest
import torch

import vescale_ckpt as vc
from vescale_storage.pack import footer_bytes


@pytest.fixture
def sparse(tmp_path):
    """Make a store whose first pack holds mostly what a deleted step had for itself."""
    with vc.open_store(tmp_path / "s") as store, vc.Checkpointer(store, "run") as checkpointer:
        checkpointer.save(1, {"same": torch.arange(1000), "own": torch.arange(9000) + 10_000})
        checkpointer.save(2, {"same": torch.arange(1000), "own": torch.arange(9000) + 20_000})
        store.delete("run", 1)
    return tmp_path / "s"


def size(url):
    return sum(path.stat().st_size for path in (url / "packs").glob("*/*"))


def test_a_dry_run(command, sparse):
    before = size(sparse)
    result = command("repack", sparse, "--grace", "0", "--dry-run")
    assert result.code == 0
    assert result.lines[0].startswith("repacking: 1 pack of which less than half is needed, in 1 snapshot, would be")
    assert size(sparse) == before
    plan = command("repack", sparse, "--grace", "0", "--dry-run", "--json").json["repack"]
    assert plan["would_rewrite"] == ["run@2"]
    assert plan["rewritten"] == []
    assert plan["packs"][0]["live_bytes"] == 8000 + footer_bytes(1)


@pytest.mark.parametrize("how", [["repack"], ["gc", "--repack"]])
def test_it_gives_back_what_is_not_needed(command, sparse, how):
    result = command(how[0], sparse, "--grace", "0", "--json", *how[1:])
    assert result.code == 0
    assert result.json["repack"]["rewritten"] == ["run@2"]
    assert size(sparse) < 82_000
    assert command("verify", sparse).code == 0
    with vc.open_store(sparse) as store:
        assert torch.equal(store["run@2"].read("same"), torch.arange(1000))


def test_nothing_to_repack(command, tmp_path):
    with vc.open_store(tmp_path / "s") as store, vc.Checkpointer(store, "run") as checkpointer:
        checkpointer.save(1, {"w": torch.arange(1000)})
    result = command("repack", tmp_path / "s", "--grace", "0")
    assert result.code == 0
    assert "0 packs of which less than half is needed" in result.lines[0]
