"""Conversions from end to end: every byte over every format, interruptions, budgets, refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.cases.inputs import same_bits
from tests.ckpt.interop.foreign import bad
from vescale_ckpt.errors import AlreadyExistsError, ConfigError, FormatError, InvalidInputError, NotFoundError
from vescale_ckpt.interop.convert import convert
from vescale_ckpt.interop.foreign.detect import open_foreign


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed": torch.randn(100, 33),
        "model.norm": torch.randn(33).to(torch.bfloat16),
        "model.mask": torch.arange(40).view(5, 8) % 3 == 0,
        "model.scalar": torch.tensor(7),
        "model.empty": torch.zeros(0, 3),
        "model.half": torch.randn(3, 5, 7).to(torch.float16),
        "model.big": torch.arange(5_000_000, dtype=torch.int32).view(1000, 5000),
    }


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    """A folder of two files with unusual names, a tie, an index and a configuration."""
    folder = tmp_path_factory.mktemp("hf")
    state = tensors()
    save_file({"model.big": state.pop("model.big")}, folder / "a.safetensors", {"format": "pt"})
    save_file(state, folder / "b-part.safetensors", {"model.head": "model.embed", "format": "pt"})
    weight_map = {"model.big": "a.safetensors"} | dict.fromkeys(state, "b-part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(found, wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    assert all(found[name].dtype == wanted[name].dtype and same_bits(found[name], wanted[name]) for name in wanted)


def with_tie() -> dict[str, torch.Tensor]:
    state = tensors()
    return {**state, "model.head": state["model.embed"]}


class TestFormats:
    def test_safetensors_keep_their_files_their_ties_and_their_configuration(self, hf, tmp_path):
        report = convert(hf, tmp_path / "out")
        assert names(tmp_path / "out") == names(hf)
        assert open_foreign(tmp_path / "out").tensors()["model.head"].alias_of == "model.embed"
        assert_same(open_foreign(tmp_path / "out").state_dict(), with_tie())
        assert report.carried == ("config.json",)
        assert report.num_tensors == 8
        assert set(load_file(tmp_path / "out" / "a.safetensors")) == {"model.big"}

    def test_what_a_header_says_beside_comes_along(self, tmp_path):
        save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors", {"format": "pt", "trained_on": "books", "v": "w"})
        convert(tmp_path / "x.safetensors", tmp_path / "out")
        found = open_foreign(tmp_path / "out")
        assert found.metadata["trained_on"] == "books"
        assert found.tensors()["v"].alias_of == "w"

    def test_one_file(self, hf, tmp_path):
        convert(hf, tmp_path / "one.safetensors")
        assert_same(load_file(tmp_path / "one.safetensors"), tensors())
        assert names(tmp_path) == ["one.safetensors"]

    @pytest.mark.filterwarnings("ignore")
    def test_dcp_is_loaded_by_torch_and_comes_back(self, hf, tmp_path):
        convert(hf, tmp_path / "dcp", target_format="dcp", max_shard_bytes=100_000)
        target = {name: torch.zeros_like(tensor) for name, tensor in with_tie().items()}
        dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
        assert_same(target, with_tie())
        convert(tmp_path / "dcp", tmp_path / "back")
        assert_same(open_foreign(tmp_path / "back").state_dict(), with_tie())
        assert (tmp_path / "back" / "config.json").exists()

    def test_torch_save_is_loaded_by_torch_with_ties_on_one_memory(self, hf, tmp_path):
        convert(hf, tmp_path / "x.pt")
        for options in ({}, {"mmap": True}):
            found = torch.load(tmp_path / "x.pt", weights_only=True, **options)
            assert_same(found, with_tie())
            assert found["model.head"].data_ptr() == found["model.embed"].data_ptr()
        convert(tmp_path / "x.pt", tmp_path / "back")
        assert open_foreign(tmp_path / "back").tensors()["model.head"].alias_of == "model.embed"

    @pytest.mark.filterwarnings("ignore")
    def test_plain_values_and_nesting_go_from_torch_save_to_dcp_and_back(self, tmp_path):
        model = torch.nn.Linear(3, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": 7, "b": b"\xff"}
        torch.save(state, tmp_path / "x.pt")
        convert(tmp_path / "x.pt", tmp_path / "dcp", target_format="dcp")
        convert(tmp_path / "dcp", tmp_path / "y.pt")
        found = torch.load(tmp_path / "y.pt", weights_only=True)
        assert found["step"] == 7
        assert found["b"] == b"\xff"
        assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
        assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])

    def test_npz_is_loaded_by_numpy_and_says_what_numpy_lacks(self, hf, tmp_path):
        with pytest.raises(InvalidInputError, match=r"model\.norm.*bfloat16"):
            convert(hf, tmp_path / "x.npz")
        assert not names(tmp_path)
        convert(hf / "a.safetensors", tmp_path / "x.npz")
        with np.load(tmp_path / "x.npz") as found:
            assert (found["model.big"] == tensors()["model.big"].numpy()).all()

    def test_values_that_the_format_cannot_hold_are_listed(self, tmp_path):
        torch.save({"w": torch.ones(1), "step": 3}, tmp_path / "x.pt")
        assert convert(tmp_path / "x.pt", tmp_path / "out").left_out == (("step", "a plain value"),)

    def test_workers_give_the_same_bytes(self, hf, tmp_path):
        convert(hf, tmp_path / "one", max_shard_bytes=5000)
        convert(hf, tmp_path / "two", max_shard_bytes=5000, workers=2, budget_bytes=64 << 20)
        assert files_of(tmp_path / "one") == files_of(tmp_path / "two")

    def test_several_hosts_share_the_files_and_rank_0_gives_the_names(self, hf, tmp_path):
        script = "import sys; from vescale_ckpt.interop.convert import convert; a = sys.argv[1:]; "
        script += "convert(a[0], a[1], max_shard_bytes=5000, share=(int(a[2]), 3), deadline_seconds=100)"
        ranks = [
            subprocess.Popen([sys.executable, "-c", script, str(hf), str(tmp_path / "three"), str(rank)])
            for rank in range(3)
        ]
        assert [rank.wait(200) for rank in ranks] == [0, 0, 0]
        convert(hf, tmp_path / "one", max_shard_bytes=5000)
        assert files_of(tmp_path / "one") == files_of(tmp_path / "three")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestUrls:
    def test_both_sides_may_be_any_fsspec_url(self, hf, tmp_path):
        memory = fsspec.filesystem("memory")
        memory.put(str(hf), "/convert/hf", recursive=True)
        convert("memory://convert/hf", "memory://convert/out")
        assert "/convert/out/config.json" in memory.find("/convert/out")
        assert not [name for name in memory.find("/convert/out") if ".vescale" in name]
        convert("memory://convert/out", tmp_path / "back")
        assert_same(open_foreign(tmp_path / "back").state_dict(), with_tie())
        convert(hf, "memory://convert/x.pt")
        assert set(open_foreign("memory://convert/x.pt").tensors()) == set(with_tie())
        with pytest.raises(AlreadyExistsError):
            convert(hf, "memory://convert/out")

    @pytest.mark.s3
    def test_on_s3_a_failed_file_never_appears(self, hf, s3_url, tmp_path):
        options = s3_url.storage_options
        report = convert(hf, f"{s3_url.url}/out", target_options=options)
        assert report.num_tensors == 8
        found = open_foreign(f"{s3_url.url}/out", storage_options=options)
        assert_same(found.state_dict(), with_tie())
        found.close()
        shutil.copytree(hf, tmp_path / "bad")
        snapshot = open_foreign(tmp_path / "bad")
        os.truncate(tmp_path / "bad" / "a.safetensors", 1_000_000)
        with pytest.raises(FormatError):
            convert(snapshot, f"{s3_url.url}/bad", target_options=options)
        with pytest.raises(NotFoundError):
            open_foreign(f"{s3_url.url}/bad", storage_options=options)


class TestInterruptions:
    def die(self, source, target, limit, target_format="safetensors") -> None:
        script = Path(__file__).with_name("interrupted.py")
        args = [sys.executable, script, source, target, target_format, str(limit)]
        done = subprocess.run(args, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 9, done.stderr

    @pytest.mark.parametrize("target_format", ["safetensors", "torch_save"])
    def test_it_goes_on_and_ends_equal(self, hf, tmp_path, target_format):
        name = "x.pt" if target_format == "torch_save" else "x.safetensors"
        self.die(hf, tmp_path / "cut" / name, 15_000_000, target_format)
        assert not (tmp_path / "cut" / name).exists()
        report = convert(hf, tmp_path / "cut" / name, budget_bytes=32 << 20)
        convert(hf, tmp_path / "whole" / name, budget_bytes=32 << 20)
        assert report.bytes_resumed >= 6_000_000
        assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")

    def test_what_was_damaged_meanwhile_is_written_again(self, hf, tmp_path):
        self.die(hf, tmp_path / "cut.safetensors", 15_000_000)
        (part,) = tmp_path.glob(".vescale-convert-cut.safetensors/*.part")
        data = bytearray(part.read_bytes())
        data[-5_000_000] ^= 1
        part.write_bytes(data)
        convert(hf, tmp_path / "cut.safetensors", budget_bytes=32 << 20)
        assert_same(load_file(tmp_path / "cut.safetensors"), tensors())
        assert names(tmp_path) == ["cut.safetensors"]

    def test_another_source_begins_anew(self, hf, tmp_path):
        shutil.copytree(hf, tmp_path / "hf")
        self.die(tmp_path / "hf", tmp_path / "out", 15_000_000)
        other = load_file(tmp_path / "hf" / "a.safetensors")
        other["model.big"] += 1
        save_file(other, tmp_path / "hf" / "a.safetensors")
        report = convert(tmp_path / "hf", tmp_path / "out", budget_bytes=32 << 20)
        assert report.bytes_resumed == 0
        assert torch.equal(open_foreign(tmp_path / "out").read("model.big"), other["model.big"])

    def test_resume_false_begins_anew(self, hf, tmp_path):
        self.die(hf, tmp_path / "x.safetensors", 15_000_000)
        assert convert(hf, tmp_path / "x.safetensors", budget_bytes=32 << 20, resume=False).bytes_resumed == 0


class TestRefusals:
    def test_a_target_that_is_there_is_left_alone(self, hf, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("x")
        with pytest.raises(AlreadyExistsError, match=r"mine\.txt"):
            convert(hf, tmp_path / "out")
        (tmp_path / "x.pt").write_text("x")
        with pytest.raises(AlreadyExistsError):
            convert(hf, tmp_path / "x.pt")
        assert (tmp_path / "x.pt").read_text() == "x"

    def test_a_hostile_or_damaged_source_leaves_nothing(self, tmp_path):
        (tmp_path / "bad").mkdir()
        (tmp_path / "out").mkdir()
        for name, path in bad.build(tmp_path / "bad").items():
            with pytest.raises((FormatError, NotFoundError)):
                convert(path, tmp_path / "out" / name)
            assert not names(tmp_path / "out"), name
        assert not list(tmp_path.rglob("MARKER"))

    def test_a_source_that_turns_out_damaged_half_way_leaves_nothing(self, hf, tmp_path):
        shutil.copytree(hf, tmp_path / "hf")
        with open_foreign(tmp_path / "hf") as snapshot:
            os.truncate(tmp_path / "hf" / "a.safetensors", 10_000_000)
            with pytest.raises(FormatError, match="cut"):
                convert(snapshot, tmp_path / "out", budget_bytes=32 << 20)
        assert names(tmp_path) == ["hf"]

    def test_nonsense_is_refused_before_anything(self, hf, tmp_path):
        with pytest.raises(ConfigError, match="parquet"):
            convert(hf, tmp_path / "out", target_format="parquet")
        with pytest.raises(ConfigError, match="budget"):
            convert(hf, tmp_path / "out", budget_bytes=1000)
        with pytest.raises(ConfigError, match="workers"):
            convert(hf, tmp_path / "out", workers=0)
        with pytest.raises(ConfigError, match="rank 2 of 2"):
            convert(hf, tmp_path / "out", share=(2, 2))
        with open_foreign(hf) as snapshot, pytest.raises(ConfigError, match="several workers"):
            convert(snapshot, tmp_path / "out", workers=2)
        torch.save({"n": 1}, tmp_path / "x.pt")
        with pytest.raises(InvalidInputError, match="no tensors"):
            convert(tmp_path / "x.pt", tmp_path / "out")
        assert names(tmp_path) == ["x.pt"]
