from __future__ import annotations

import pytest
import torch

import vescale_ckpt as vc
from vescale_ckpt.interop.safetensors import load_hf

NAME = "gpt [0]*@10"


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_export(command, url, tmp_path):
    result = command("export", url, NAME, tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    assert files_in(tmp_path / "out") == ["model.safetensors"]
    assert result.lines[0].startswith(f"exported 'model' of {NAME} to {tmp_path / 'out'}: 3 tensors, 3.33 kB, in ")
    assert result.lines[2].split()[:2] == ["model.safetensors", "3"]
    assert result.lines[3:] == [
        "tied, stored once: 1",
        "  head.weight = embed.weight",
        "left out: 1",
        "  _extra_state: bytes, not a tensor",
    ]
    model = load_hf(tmp_path / "out")["model"]
    with vc.open_store(url) as store:
        assert torch.equal(model["embed.weight"], store[NAME].read("model.embed.weight"))
    assert model["head.weight"] is model["embed.weight"]


def test_as_json(command, url, tmp_path):
    result = command(
        "export", url, NAME, tmp_path / "out", "--json", "--dtype", "bf16", "--max-shard-size", "1600"
    ).json
    assert (result["snapshot"], result["select"], result["dry_run"]) == (NAME, "model", False)
    assert result["folder"] == str(tmp_path / "out")
    assert [file["tensors"] for file in result["files"]] == [["embed.weight"], ["ids", "norm.weight"]]
    assert [file["bytes"] for file in result["files"]] == [
        (tmp_path / "out" / file["name"]).stat().st_size for file in result["files"]
    ]
    assert result["ties"] == {"head.weight": "embed.weight"}
    assert result["cast"] == {
        "embed.weight": {"from": "float32", "to": "bfloat16"},
        "norm.weight": {"from": "float32", "to": "bfloat16"},
    }
    assert result["left_out"] == [{"name": "_extra_state", "why": "bytes, not a tensor"}]
    assert result["bytes"] == 1600 + 32 + 64
    assert result["seconds"] > 0


def test_a_dry_run_writes_nothing(command, url, tmp_path):
    result = command("export", url, NAME, tmp_path / "out", "--dry-run", "--dtype", "fp16")
    assert result.code == 0
    assert result.lines[0].startswith("would export 'model' of")
    assert "cast: 2 tensors float32 -> float16" in result.lines
    assert not (tmp_path / "out").exists()
    assert command("export", url, NAME, tmp_path / "out", "--dry-run", "--json").json["dry_run"] is True


def test_everything_and_a_subtree(command, url, tmp_path):
    assert command("export", url, NAME, tmp_path / "all", "--select", "").code == 0
    assert set(load_hf(tmp_path / "all")["model"]) == {
        "model.embed.weight",
        "model.head.weight",
        "model.norm.weight",
        "model.ids",
        "optimizer.state.embed.weight.exp_avg",
        "rng.0",
    }
    assert command("export", url, NAME, tmp_path / "part", "--select", "optimizer.state").code == 0
    assert set(load_hf(tmp_path / "part")["model"]) == {"embed.weight.exp_avg"}


def test_a_folder_that_is_not_empty(command, url, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    result = command("export", url, NAME, out)
    assert (result.code, result.out) == (11, "")
    assert "config.json" in result.err
    assert command("export", url, NAME, out, "--dry-run").code == 11
    assert command("export", url, NAME, out, "--overwrite").code == 0
    again = command("export", url, "gpt [0]*@20", out, "--overwrite", "--json", "--dry-run")
    assert again.json["replaced"] == ["model.safetensors"]
    again = command("export", url, "gpt [0]*@20", out, "--overwrite")
    assert "replaced: model.safetensors" in again.lines
    assert files_in(out) == ["config.json", "model.safetensors"]


def test_overflow_is_a_warning(command, tmp_path):
    url = "memory://tools-export"
    with vc.open_store(url) as store, vc.Checkpointer(store, "run") as checkpointer:
        checkpointer.save(0, {"w": torch.tensor([1e6, 1.0, -1e9])})
    result = command("export", url, "run", tmp_path / "out", "--dtype", "fp16")
    assert result.code == 0
    assert result.err == "vescale-ckpt: warning: w: 2 finite values became infinite in the cast\n"
    result = command("export", url, "run", tmp_path / "out", "--dtype", "fp16", "--overwrite", "--json")
    assert result.json["overflowed"] == {"w": 2}


def test_long_lists_are_cut_for_people_only(command, tmp_path):
    url = "memory://tools-export-long"
    with vc.open_store(url) as store, vc.Checkpointer(store, "run") as checkpointer:
        checkpointer.save(0, {"w": torch.zeros(1), **{f"v{i}": i for i in range(50)}})
    result = command("export", url, "run", tmp_path / "out", "--dry-run")
    assert result.lines[-1] == "  and 30 more; --json lists all"
    assert len(command("export", url, "run", tmp_path / "out", "--dry-run", "--json").json["left_out"]) == 50


def test_what_is_not_there(command, url, tmp_path):
    assert command("export", url, "nope@1", tmp_path / "out").code == 10
    result = command("export", url, NAME, tmp_path / "out", "--select", "modle")
    assert result.code == 10
    assert "'model'" in result.err
    assert not (tmp_path / "out").exists()


def test_damaged_data_are_not_exported(command, url, tmp_path, damage):
    for pack in (url / "packs").glob("*/*"):
        damage(pack, 0)
    result = command("export", url, NAME, tmp_path / "out", "--json")
    assert result.code == 3
    assert result.json["error"]["kind"] == "corruption"
    assert not (tmp_path / "out").exists()


def test_a_folder_under_a_file(command, url, tmp_path):
    (tmp_path / "file").write_text("")
    assert command("export", url, NAME, tmp_path / "file" / "out").code == 1
    assert command("export", url, NAME, tmp_path / "file").code == 11


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_dtypes(command, url, tmp_path, dtype):
    assert command("export", url, NAME, tmp_path / "out", "--dtype", dtype).code == 0
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    assert load_hf(tmp_path / "out")["model"]["norm.weight"].dtype == names[dtype]
