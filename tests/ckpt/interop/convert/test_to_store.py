"""Checkpoints of other formats become snapshots of a store, and come back."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import vescale_ckpt as vc
from vescale_ckpt.errors import AlreadyExistsError, ConfigError, FormatError
from vescale_ckpt.interop.convert import convert
from vescale_ckpt.interop.foreign.detect import open_foreign


def test_names_come_below_model_and_ties_are_stored_once(tmp_path):
    w = torch.arange(600_000.0).view(600, 1000)
    save_file({"embed": w, "b": torch.ones(3)}, tmp_path / "x.safetensors", {"head": "embed"})
    report = convert(tmp_path / "x.safetensors", f"{tmp_path}/store#llama@7")
    assert (report.target_format, report.files, report.num_tensors) == ("vescale", ("llama@7",), 3)
    with vc.open_store(tmp_path / "store") as store:
        snapshot = store["llama@7"]
        assert snapshot.tensors()["model.head"].alias_of == "model.embed"
        assert torch.equal(snapshot.read("model.head"), w)
        assert snapshot.metadata["format"] == "safetensors"
        assert snapshot.verify().ok
        model = {"embed": torch.zeros(600, 1000), "b": torch.zeros(3), "head": torch.zeros(0)}
        model["head"] = model["embed"]
        with vc.Checkpointer(store, "llama") as checkpointer:
            checkpointer.load({"model": model})
        assert torch.equal(model["head"], w)


def test_nesting_and_values_stay_and_come_back(tmp_path):
    state = {"model": {"a.b": torch.ones(2)}, "step": 7, "lr": [0.1, None], "deep": {"x": {"y": torch.zeros(1)}}}
    torch.save(state, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", f"{tmp_path}/store#run@1")
    with vc.open_store(tmp_path / "store") as store:
        found = store["run@1"].state_dict()
    assert found["step"] == 7
    assert found["lr"] == [0.1, None]
    convert(f"{tmp_path}/store#run@1", tmp_path / "y.pt")
    back = torch.load(tmp_path / "y.pt")
    assert back["model"]["a.b"].tolist() == [1, 1]
    assert back["deep"]["x"]["y"].tolist() == [0]
    assert back["step"] == 7


def test_what_is_there_stays_and_what_is_no_name_is_refused(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", f"{tmp_path}/store#run@1")
    convert(tmp_path / "x.safetensors", f"{tmp_path}/store#run@2")
    with pytest.raises(AlreadyExistsError):
        convert(tmp_path / "x.safetensors", f"{tmp_path}/store#run@1")
    with pytest.raises(ConfigError, match="run and step"):
        convert(tmp_path / "x.safetensors", f"{tmp_path}/store#run")
    with vc.open_store(tmp_path / "store") as store:
        assert [info.step for info in store.snapshots("run")] == [1, 2]
        assert store["run@1"].ref.version == 1


def test_a_dry_run_makes_no_store(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    assert convert(tmp_path / "x.safetensors", f"{tmp_path}/store#run@1", dry_run=True).num_bytes == 4
    assert not (tmp_path / "store").exists()


def test_a_damaged_source_commits_nothing(tmp_path):
    save_file({"w": torch.ones(1000)}, tmp_path / "x.safetensors")
    with open_foreign(tmp_path / "x.safetensors") as snapshot:
        data = (tmp_path / "x.safetensors").read_bytes()
        with (tmp_path / "x.safetensors").open("r+b") as file:
            file.truncate(len(data) - 8)
        with pytest.raises(FormatError, match="cut"):
            convert(snapshot, f"{tmp_path}/store#run@1")
    with vc.open_store(tmp_path / "store") as store:
        assert store.newest("run") is None
