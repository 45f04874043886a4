from __future__ import annotations

import pytest
import torch

import vescale_ckpt as vc


def files(url):
    kept = ("packs", "manifests", "refs", "index")
    return {
        str(path.relative_to(url)): path.read_bytes()
        for path in url.rglob("*")
        if path.is_file() and path.relative_to(url).parts[0] in kept
    }


def test_a_copy(command, url, tmp_path):
    command("tag", url, "other@0", "best")
    planned = command("mirror", url, tmp_path / "copy", "--dry-run")
    assert planned.code == 0
    assert planned.lines[-1].startswith("would copy 3 snapshots and 1 tag to ")
    assert not (tmp_path / "copy").exists()
    result = command("mirror", url, tmp_path / "copy", "--json")
    assert (result.code, result.err) == (0, "")
    assert result.json["whole"] is True
    assert result.json["packs"] == result.json["plan"]["packs"] == 3
    assert result.json["tags"] == ["other@best"]
    assert files(url) == files(tmp_path / "copy")
    assert command("verify", tmp_path / "copy").code == 0
    again = command("mirror", url, tmp_path / "copy")
    assert again.lines[-1].startswith("copied 0 snapshots and 0 tags to ")
    assert again.lines[-1].endswith("3 were there already")


def test_one_run(command, url, tmp_path):
    assert command("mirror", url, tmp_path / "copy", "--run", "other").code == 0
    assert [run["run"] for run in command("ls", tmp_path / "copy", "--json").json["runs"]] == ["other"]


def test_what_is_in_the_way(command, url, tmp_path):
    with vc.open_store(tmp_path / "copy") as store, vc.Checkpointer(store, "other") as checkpointer:
        checkpointer.save(0, {"mine": torch.ones(1)})
    result = command("mirror", url, tmp_path / "copy")
    assert result.code == 11
    assert "other@0 version 1: the target has another one; it stays as it is" in result.err
    assert command("show", tmp_path / "copy", "other@0", "mine").code == 0


def test_damage_at_the_source(command, url, tmp_path, damage):
    damage(max((url / "packs").glob("*/*"), key=lambda path: path.stat().st_size), 100)
    result = command("mirror", url, tmp_path / "copy", "--json")
    assert result.code == 3
    assert "damaged" in result.json["failed"][0]
    assert command("verify", tmp_path / "copy").code == 0


def test_bad_input(command, url, tmp_path):
    assert command("mirror", tmp_path / "none", tmp_path / "copy").code == 10
    assert command("mirror", url, tmp_path / "copy", "--run", "nope").code == 10
    assert command("mirror", url).code == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    assert command("mirror", url, tmp_path / "full").code == 2
    assert not (tmp_path / "full" / "refs").exists()


@pytest.mark.s3
def test_to_s3_and_back(command, url, s3_url, tmp_path):
    options = [f"{name}={value}" for name, value in s3_url.storage_options.items()]
    to = [f"--to-option={option}" for option in options]
    assert command("mirror", url, s3_url.url, *to).code == 0
    back = [f"--storage-option={option}" for option in options]
    assert command("mirror", s3_url.url, tmp_path / "copy", *back).code == 0
    assert files(url) == files(tmp_path / "copy")
