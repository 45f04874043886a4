"""torch.save files as snapshots: names, values, ties, optimizers."""

from __future__ import annotations

import pytest
import torch

from vescale_ckpt.errors import FormatError, NotFoundError
from vescale_ckpt.interop.foreign.detect import open_foreign


def test_a_training_state_comes_back_with_names_values_and_ties(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach().t().clone())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "lr": [0.1, 0.2]}
    state["model"]["tied"] = state["model"]["0.weight"]
    torch.save(state, tmp_path / "x.pt")
    snapshot = open_foreign(tmp_path / "x.pt")
    tensors = snapshot.tensors()
    assert tensors["model.tied"].alias_of == "model.0.weight"
    assert tensors["optimizer.state.0.exp_avg"].path == ("optimizer", "state", 0, "exp_avg")
    assert torch.equal(snapshot.read("optimizer.state.0.exp_avg"), state["optimizer"]["state"][0]["exp_avg"])
    assert torch.equal(snapshot.read("model.tied"), model[0].weight)
    assert snapshot.values["step"] == 7
    assert snapshot.values["lr"] == [0.1, 0.2]
    assert snapshot.values["optimizer.param_groups"][0]["params"] == [0, 1, 2, 3]
    both = snapshot.state_dict()
    assert both["model.tied"] is both["model.0.weight"]


def test_what_is_not_there_is_told(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(NotFoundError, match="'w'"):
        open_foreign(tmp_path / "x.pt").read("v")


def test_a_whole_module_is_code_and_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"torch\.nn\.modules\.linear\.Linear"):
        open_foreign(tmp_path / "x.pt")


def test_a_fingerprint_changes_with_the_content_and_not_else(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(1000)}, path)
    first = open_foreign(path).fingerprint()
    assert open_foreign(path).fingerprint() == first
    torch.save({"w": torch.zeros(1000)}, path)
    assert open_foreign(path).fingerprint() != first
