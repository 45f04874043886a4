from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import vescale_ckpt as vc
from tests.ckpt.interop.foreign import bad
from vescale_tools.common import ExitCode

NAME = "gpt [0]*@10"


def test_a_file_becomes_another(command, tmp_path):
    save_file({"w": torch.ones(3, 4), "b": torch.zeros(4)}, tmp_path / "x.safetensors")
    result = command("convert", tmp_path / "x.safetensors", tmp_path / "y.pt")
    assert (result.code, result.err) == (0, "")
    assert result.lines[0].startswith(
        f"converted {tmp_path / 'x.safetensors'} (safetensors) to {tmp_path / 'y.pt'} (torch_save): 2 tensors, "
    )
    assert torch.load(tmp_path / "y.pt")["w"].sum() == 12


def test_a_snapshot_of_a_store(command, url, tmp_path):
    result = command("convert", f"{url}#{NAME}", tmp_path / "out.safetensors", "--json").json
    assert result["source"]["format"] == "vescale"
    assert result["dry_run"] is False
    found = load_file(tmp_path / "out.safetensors")
    with vc.open_store(url) as store:
        assert torch.equal(found["model.embed.weight"], store[NAME].read("model.embed.weight"))


def test_a_dry_run_does_nothing(command, tmp_path):
    save_file({"w": torch.ones(3, 4)}, tmp_path / "x.safetensors")
    result = command("convert", tmp_path / "x.safetensors", tmp_path / "out", "--dry-run", "--json").json
    assert result["dry_run"] is True
    assert result["files"] == ["model.safetensors"]
    assert not (tmp_path / "out").exists()


def test_a_key_map_with_casts_tells_of_overflows(command, tmp_path):
    save_file({"a.w": torch.tensor([1.0, 1e30])}, tmp_path / "x.safetensors")
    (tmp_path / "map.toml").write_text(
        'version = 1\n[[rule]]\nfrom = "a.w"\nto = "b.w"\n[[cast]]\nmatch = ".*"\ndtype = "float16"\n'
    )
    result = command(
        "convert", tmp_path / "x.safetensors", tmp_path / "y.safetensors", "--keymap", tmp_path / "map.toml"
    )
    assert result.code == 0
    assert "b.w: 1 finite value became infinite in the cast" in result.err
    assert load_file(tmp_path / "y.safetensors")["b.w"].dtype == torch.float16


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("absent", "out"), ExitCode.NOT_FOUND),
        (("x.pt", "x.pt"), ExitCode.CONFLICT),
        (("x.pt", "out", "--keymap", "nothing:a->b"), ExitCode.NOT_FOUND),
        (("x.pt", "out", "--budget", "1MB"), ExitCode.USAGE),
        (("x.pt", "out", "--set", "heads"), ExitCode.USAGE),
        (("x.pt", "out", "--to", "parquet"), ExitCode.USAGE),
        (("bad.pt", "out"), ExitCode.DAMAGED),
    ],
)
def test_what_is_wrong_has_its_exit_code_and_writes_nothing(command, tmp_path, monkeypatch, args, code):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(1)}, "x.pt")
    bad.archive(tmp_path / "bad.pt", {"x/data.pkl": b"cos\nsystem\n.", "x/version": b"3\n"})
    result = command("convert", *args)
    assert result.code == code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.pt", "x.pt"]
