from __future__ import annotations

import pytest

import vescale_ckpt as vc

RUN = "gpt [0]*"


def packs(url):
    return sorted((url / "packs").glob("*/*"), key=lambda path: path.stat().st_size)


def test_a_sound_store(command, url):
    result = command("fsck", url, "--deep")
    assert (result.code, result.err) == (0, "")
    assert result.lines[-1].endswith("nothing is wrong")
    assert command("fsck", url, "--json").json["ok"] is True


def test_a_repair(command, url, damage):
    for pack in packs(url):
        damage(pack, pack.stat().st_size - 1)
    for path in (url / "index").glob("*/*"):
        path.unlink()
    looked = command("fsck", url)
    assert looked.code == 3
    assert looked.out.count("repair: it is put together again") == 3
    tried = command("fsck", url, "--repair", "--dry-run")
    assert tried.code == 3
    assert tried.lines[-1] == "would repair 6 of 6 findings"
    assert command("verify", url).code == 3
    result = command("fsck", url, "--repair")
    assert result.code == 0
    assert result.lines[-1] == "repaired 6 objects; all is as it should be"
    assert command("verify", url, "--deep").code == 0


def test_what_cannot_be_repaired_is_said(command, url, damage):
    with vc.open_store(url) as store:
        name = store[f"{RUN}@10"].ref.manifest
    damage(url / "manifests" / name[:2] / name, 60)
    result = command("fsck", url, "--repair")
    assert result.code == 3
    assert "no repair: nothing: packs do not say which tensor" in result.out
    found = command("fsck", url, "--json").json
    assert found["findings"][0]["can_repair"] is False
    assert found["findings"][0]["snapshots"] == [f"{RUN}@10"]


def test_with_a_mirror(command, url, tmp_path):
    command("mirror", url, tmp_path / "copy")
    for folder in ("packs", "manifests", "index"):
        for path in (url / folder).glob("*/*"):
            path.unlink()
    assert command("fsck", url).code == 3
    result = command("fsck", url, "--repair", "--mirror", tmp_path / "copy", "--json")
    assert result.code == 0
    assert result.json["ok"] is False
    assert result.json["ok_after"] is True
    assert command("verify", url, "--deep").code == 0


def test_a_store_that_does_not_open(command, url):
    (url / "store.json").unlink()
    assert command("ls", url).code == 3
    assert command("fsck", url, "--repair").code == 0
    assert command("ls", url).code == 0


def test_a_deleted_snapshot_is_brought_back(command, url):
    command("rm", url, f"{RUN}@20")
    listed = command("fsck", url)
    assert f"{RUN}@20" in listed.out
    orphan = command("fsck", url, "--json").json["orphans"][0]
    assert orphan["missing_packs"] == 0
    assert command("fsck", url, "--recover", orphan["manifest"][:10], "--dry-run").code == 0
    assert command("show", url, f"{RUN}@20").code == 10
    result = command("fsck", url, "--recover", orphan["manifest"][:10])
    assert result.lines == [f"{RUN}@20 is back, as version 1"]
    assert command("show", url, f"{RUN}@20").code == 0


@pytest.mark.parametrize(("arguments", "code"), [(["--recover", "ffff"], 10), (["--recover", "f", "--repair"], 2)])
def test_bad_input(command, url, tmp_path, arguments, code):
    assert command("fsck", url, *arguments).code == code
    assert command("fsck", tmp_path / "none").code == 10
    assert command("fsck").code == 2
