from __future__ import annotations

import vescale_ckpt as vc


def test_runs(command, url):
    result = command("ls", url)
    assert (result.code, result.err) == (0, "")
    assert [line.split("  ")[0] for line in result.lines] == ["run", "gpt [0]*", "other"]
    assert result.lines[1].split()[2:4] == ["2", "20"]


def test_runs_as_json(command, url):
    runs = command("ls", url, "--json").json["runs"]
    assert [(run["run"], run["snapshots"], run["newest_step"]) for run in runs] == [
        ("gpt [0]*", 2, 20),
        ("other", 1, 0),
    ]
    assert all(run["created_seconds"] > 1.7e9 and run["created"].endswith("+00:00") for run in runs)


def test_snapshots(command, url):
    command("tag", url, "gpt [0]*@20", "best")
    result = command("ls", url, "gpt [0]*")
    assert result.code == 0
    assert [line.split()[0] for line in result.lines] == ["step", "10", "20"]
    assert result.lines[2].endswith("best")
    assert "6.56 kB" in result.lines[1]


def test_snapshots_as_json(command, url):
    command("tag", url, "gpt [0]*@20", "best")
    result = command("ls", url, "gpt [0]*", "--json").json
    assert result["run"] == "gpt [0]*"
    first, second = result["snapshots"]
    assert (first["name"], first["version"], first["tags"]) == ("gpt [0]*@10", 1, [])
    assert (second["step"], second["tags"], second["tensors"]) == (20, ["best"], 7)
    # embed, norm, ids, extra state, moment, rng; the tied head counts once
    assert second["bytes"] == 3200 + 64 + 64 + 3 + 3200 + 32
    assert second["stored_bytes"] == second["bytes"]


def test_without_sizes_no_manifest_is_read(command, url):
    for path in (url / "manifests").glob("*/*"):
        path.unlink()
    result = command("ls", url, "gpt [0]*", "--no-size")
    assert (result.code, result.err) == (0, "")
    assert [line.split()[-2:] for line in result.lines[1:]] == [["?", "?"]] * 2


def test_a_damaged_snapshot_does_not_hide_the_others(command, url, damage):
    with vc.open_store(url) as store:
        ref = store["gpt [0]*@10"].ref
    damage(url / "manifests" / ref.manifest[:2] / ref.manifest, 50)
    result = command("ls", url, "gpt [0]*")
    assert result.code == 3
    assert [line.split()[0] for line in result.lines] == ["step", "10", "20"]
    assert result.lines[1].split()[-2:] == ["?", "?"]
    assert ref.manifest in result.err


def test_a_damaged_ref_does_not_hide_the_other_runs(command, url, damage):
    damage(next((url / "refs" / "other").glob("0*")), 20)
    result = command("ls", url)
    assert result.code == 3
    assert result.lines[2].split() == ["other", "1", "0", "damaged"]
    assert result.lines[1].startswith("gpt [0]*")
    assert "refs/other/" in result.err


def test_a_run_that_is_not_there(command, url):
    result = command("ls", url, "gtp")
    assert (result.code, result.out) == (10, "")
    assert "its runs are 'gpt [0]*', 'other'" in result.err
    assert command("ls", url, "a/b").code == 2


def test_a_store_without_runs(command, tmp_path):
    with vc.open_store(tmp_path / "s") as store:
        store.require(create=True)
    result = command("ls", tmp_path / "s")
    assert (result.code, result.out) == (0, f"{tmp_path / 's'} is a store without any run\n")
    assert command("ls", tmp_path / "s", "--json").json["runs"] == []
