"""Foreign checkpoints loaded onto modules and tensors, without conversion; worlds are in the folder of DCP's tests."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import vescale_ckpt as vc
from vescale_ckpt.errors import MismatchError
from vescale_ckpt.interop.foreign.detect import open_foreign
from vescale_ckpt.interop.foreign.load import load_foreign


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    net.register_buffer("calls", torch.tensor(3))
    return net


def test_safetensors_go_into_a_module(tmp_path):
    source, target = model(), model()
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    nn.init.zeros_(target[0].weight)
    where = target[0].weight.data_ptr()
    assert load_foreign(open_foreign(tmp_path), {"model": target}) == ()
    assert all(
        torch.equal(a, b) for a, b in zip(target.state_dict().values(), source.state_dict().values(), strict=True)
    )
    assert target[0].weight.data_ptr() == where


def test_ties_values_and_nesting_of_torch_save(tmp_path):
    w = torch.arange(6.0).view(2, 3)
    torch.save(
        {"model": {"a.weight": w, "b.weight": w}, "step": 7, "list": [1, {"t": torch.ones(2)}]}, tmp_path / "x.pt"
    )
    net = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False), "b": nn.Linear(3, 2, bias=False)})
    net["b"].weight = net["a"].weight
    state = {"model": net, "step": 0, "list": {0: 0, 1: {"t": torch.zeros(2)}}}
    load_foreign(open_foreign(tmp_path / "x.pt"), state)
    assert torch.equal(net["b"].weight, w)
    assert state["step"] == 7
    assert state["list"][1]["t"].tolist() == [1, 1]


def test_a_view_of_explicit_offsets(tmp_path):
    whole = torch.arange(40.0).view(8, 5)
    torch.save({"w": whole}, tmp_path / "x.pt")
    local = torch.zeros(3, 5)
    view = vc.ShardedView((8, 5), torch.float32, [((2, 0), local)])
    load_foreign(open_foreign(tmp_path / "x.pt"), {"w": view})
    assert torch.equal(local, whole[2:5])


def test_everything_that_does_not_fit_is_told_and_nothing_is_changed(tmp_path):
    state = model().state_dict()
    state["0.weight"] = torch.ones(5, 5)
    state["more"] = torch.ones(1)
    del state["2.bias"]
    save_file(state, tmp_path / "model.safetensors")
    target = model()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(MismatchError) as raised:
        load_foreign(open_foreign(tmp_path), {"model": target})
    text = "\n".join(raised.value.problems)
    assert all(name in text for name in ("0.weight", "more", "2.bias"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_casts_and_renames_are_allowed_one_by_one(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    with pytest.raises(MismatchError, match="dtype"):
        load_foreign(open_foreign(tmp_path / "x.safetensors"), {"model": {"w": torch.zeros(3, dtype=torch.float16)}})
    target = {"model": {"v": torch.zeros(3, dtype=torch.float16)}}
    notes = load_foreign(open_foreign(tmp_path / "x.safetensors"), target, cast=True, rename={"model.v": "model.w"})
    assert target["model"]["v"].tolist() == [1, 1, 1]
    assert notes
