from __future__ import annotations

import pytest
import torch

import vescale_ckpt as vc


@pytest.fixture
def store_url(tmp_path):
    """Make a store of three steps that share a tensor, and delete one."""
    with vc.open_store(tmp_path / "s") as store, vc.Checkpointer(store, "run") as checkpointer:
        for step in (1, 2, 3):
            state = {"same": torch.arange(5000), "own": torch.arange(2000) + 10_000 * step}
            checkpointer.save(step, state)
        store.delete("run", 2)
    return tmp_path / "s"


def packs(url):
    return sorted(path.name for path in (url / "packs").glob("*/*"))


def test_a_dry_run_prints_its_plan_and_changes_nothing(command, store_url):
    before = sorted(path for path in store_url.rglob("*") if path.is_file())
    result = command("gc", store_url, "--grace", "0", "--dry-run")
    assert result.code == 0
    assert result.lines[0].startswith("in use by 2 refs and 0 tags: 2 packs (")
    rows = {line.split("  ")[0]: line for line in result.lines[1:]}
    assert rows["would be deleted"].split()[3] == "2", "one pack and one manifest"
    as_json = command("gc", store_url, "--grace", "0", "--dry-run", "--json").json
    assert as_json["dry_run"] is True
    assert len(as_json["plan"]["mark"]) == 2
    assert as_json["done"]["deleted"]["packs"] == {"objects": 0, "bytes": 0}
    assert sorted(path for path in store_url.rglob("*") if path.is_file()) == before


def test_without_a_grace_period_it_deletes_at_once(command, store_url):
    assert len(packs(store_url)) == 3
    result = command("gc", store_url, "--grace", "0", "--json")
    assert result.code == 0
    assert result.json["done"]["deleted"]["packs"]["objects"] == 1
    assert result.json["done"]["deleted"]["manifests"]["objects"] == 1
    assert len(packs(store_url)) == 2
    assert command("verify", store_url).code == 0
    assert "there is nothing to do" in command("gc", store_url, "--grace", "0").out


def test_with_one_it_waits(command, store_url):
    result = command("gc", store_url, "--grace", "1h", "--json").json
    assert result["grace_seconds"] == 3600
    assert result["plan"]["young"]["objects"] == 2
    assert len(packs(store_url)) == 3


@pytest.mark.parametrize("grace", ["-1", "soon", "1 week", ""])
def test_bad_times(command, store_url, grace):
    result = command("gc", store_url, f"--grace={grace}")
    assert result.code == 2
    assert "is no time" in result.err


def test_a_damaged_ref_stops_it(command, store_url, damage):
    damage(store_url / "refs" / "run" / "000000000001.000001", 100)
    result = command("gc", store_url, "--grace", "0")
    assert (result.code, result.out) == (3, "")
    assert len(packs(store_url)) == 3
