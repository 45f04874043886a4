from __future__ import annotations

import pytest

import vescale_ckpt as vc
from vescale_ckpt.errors import StorageError, UnsupportedVersionError
from vescale_ckpt.snapshot import Snapshot


def packs(url):
    return sorted((url / "packs").glob("*/*"), key=lambda path: -path.stat().st_size)


def test_all_of_all_runs(command, url):
    result = command("verify", url)
    assert (result.code, result.err) == (0, "")
    assert [line.split("  ")[:2] for line in result.lines[:-1]] == [
        ["gpt [0]*@10", "ok"],
        ["gpt [0]*@20", "ok"],
        ["other@0", "ok"],
    ]
    assert result.lines[-1] == "3 snapshots verified, nothing is wrong"


def test_one_by_name(command, url):
    result = command("verify", url, "gpt [0]*@10", "other", "--json")
    assert result.code == 0
    assert result.json["ok"] is True
    assert [snapshot["name"] for snapshot in result.json["snapshots"]] == ["gpt [0]*@10", "other@0"]
    first = result.json["snapshots"][0]
    assert (first["ok"], first["chunks"], first["packs"], first["problems"]) == (True, 6, 1, [])
    assert first["bytes"] == 6563


def test_a_flipped_byte(command, url, damage):
    damage(packs(url)[0], 100)
    result = command("verify", url)
    assert result.code == 3
    bad = [line for line in result.lines if "  BAD  " in line]
    assert len(bad) == 1
    problem = result.lines[result.lines.index(bad[0]) + 1]
    assert problem.startswith("  cannot load 'model.embed.weight'")
    assert result.lines[-1] == "1 of 3 snapshots are bad: 1 problem"
    as_json = command("verify", url, "--json")
    assert as_json.code == 3
    assert as_json.json["ok"] is False
    assert sum(len(snapshot["problems"]) for snapshot in as_json.json["snapshots"]) == 1


def test_all_problems_are_listed(command, url, damage):
    damage(packs(url)[0], 100)
    damage(packs(url)[0], 3300)
    result = command("verify", url, "--json").json
    # what the second snapshot shares with the first is bad in both
    assert sorted(len(snapshot["problems"]) for snapshot in result["snapshots"]) == [0, 1, 2]


def test_a_pack_that_is_gone(command, url):
    packs(url)[-1].unlink()
    result = command("verify", url, "--json")
    assert result.code == 3
    assert [snapshot["ok"] for snapshot in result.json["snapshots"]] == [True, True, False]


@pytest.mark.parametrize("at", [5, 60])
def test_a_damaged_manifest_is_a_problem_of_its_snapshot(command, url, damage, at):
    with vc.open_store(url) as store:
        ref = store["gpt [0]*@10"].ref
    damage(url / "manifests" / ref.manifest[:2] / ref.manifest, at)
    result = command("verify", url, "--json")
    assert result.code == 3
    assert [snapshot["ok"] for snapshot in result.json["snapshots"]] == [False, True, True]


def test_what_is_not_there(command, url):
    result = command("verify", url, "gpt [0]*@10", "nope@1")
    assert result.code == 10
    assert "nope" in result.err


def test_an_environment_that_fails_is_not_damage(command, url, monkeypatch):
    def fail(self, progress=None, **options):
        raise StorageError("the network is down")

    monkeypatch.setattr(Snapshot, "verify", fail)
    result = command("verify", url, "--json")
    assert result.code == 1
    assert result.json["error"]["message"] == "the network is down"


def test_a_newer_version_is_not_damage(command, url, monkeypatch):
    def fail(self, progress=None, **options):
        raise UnsupportedVersionError("written by version 9")

    monkeypatch.setattr(Snapshot, "verify", fail)
    assert command("verify", url).code == 12


def test_nothing_to_verify(command, tmp_path):
    with vc.open_store(tmp_path / "s") as store:
        store.require(create=True)
    result = command("verify", tmp_path / "s")
    assert result.code == 0
    assert "nothing to verify" in result.out
    assert command("verify", tmp_path / "s", "--json").json == {"ok": True, "snapshots": []}


def test_a_sample(command, url, damage):
    result = command("verify", url, "gpt [0]*@10", "--sample", "2", "--seed", "1", "--json")
    assert result.code == 0
    assert result.json["snapshots"][0]["chunks"] == 2
    damage(packs(url)[0], packs(url)[0].stat().st_size - 30)
    assert command("verify", url, "--sample", "1").code == 3, "footers are read all the same"


def test_deep_looks_at_what_no_snapshot_needs(command, url, damage):
    result = command("verify", url, "--deep")
    assert (result.code, result.err) == (0, "")
    assert result.lines[-1].endswith("nothing is wrong")
    with vc.open_store(url) as store:
        store.delete("other", 0)
    damage(packs(url)[-1], 3)
    assert command("verify", url).code == 0
    result = command("verify", url, "--deep", "--json")
    assert result.code == 3
    assert [finding["kind"] for finding in result.json["findings"]] == ["pack"]
    assert result.json["bytes_read"] == sum(path.stat().st_size for path in packs(url))


@pytest.mark.parametrize(
    "options", [["--sample", "0"], ["--sample", "x"], ["--seed", "1"], ["--deep", "--sample", "3"], ["--deep", "other"]]
)
def test_bad_options(command, url, options):
    assert command("verify", url, *options).code == 2


def test_deep_needs_a_store(command, tmp_path):
    assert command("verify", tmp_path / "none", "--deep").code == 10
