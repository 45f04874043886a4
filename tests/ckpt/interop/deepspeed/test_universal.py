"""Universal checkpoints, written by code that follows DeepSpeed's layout."""

from __future__ import annotations

import pytest
import torch

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.foreign.detect import open_foreign


@pytest.fixture
def folder(tmp_path):
    for name in ("layers.0.weight", "norm.bias"):
        path = tmp_path / "u" / "zero" / name
        path.mkdir(parents=True)
        for i, kind in enumerate(("fp32", "exp_avg", "exp_avg_sq")):
            torch.save({"param": torch.full((2, 3), float(i)), "cat_dim": 0}, path / f"{kind}.pt")
        torch.save(torch.tensor(4.0), path / "step.pt")
    torch.save({"iteration": 3}, tmp_path / "u" / "mp_rank_00_model_states.pt")
    return tmp_path / "u"


def test_masters_moments_and_steps(folder):
    snapshot = open_foreign(folder)
    assert snapshot.format == "deepspeed_universal"
    assert snapshot.read("model.layers.0.weight").tolist() == [[0] * 3] * 2
    assert snapshot.read("optimizer.exp_avg_sq.norm.bias").tolist() == [[2] * 3] * 2
    assert snapshot.read("optimizer.step.norm.bias") == 4
    assert snapshot.tensors()["model.layers.0.weight"].path == ("model", "layers.0.weight")


def test_what_is_none_of_it_is_refused(folder):
    torch.save({"x": "y"}, folder / "zero" / "norm.bias" / "fp32.pt")
    with pytest.raises(FormatError, match="neither a tensor nor a number"):
        open_foreign(folder)
