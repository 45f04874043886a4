"""``torch_dist`` checkpoints of Megatron-core, written by code that follows its layout."""

from __future__ import annotations

import argparse
import io
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.foreign.detect import open_foreign

pytestmark = pytest.mark.filterwarnings("ignore")
LAYERS = torch.arange(2 * 6 * 4.0).view(2, 6, 4)


@pytest.fixture
def folder(tmp_path):
    """Parameters of all layers in one tensor, a common part, and what says which backend wrote them."""
    state = {"model.decoder.layers.mlp.linear_fc2.weight": LAYERS, "optimizer.step": torch.tensor(3.0)}
    dcp.save(state, checkpoint_id=tmp_path / "it", no_dist=True)
    args = argparse.Namespace(num_layers=2, swiglu=True, params_dtype=torch.bfloat16)
    common = {"args": args, "iteration": 10, "rng": torch.arange(5), "checkpoint_version": 3.0}
    torch.save(common, tmp_path / "it" / "common.pt")
    (tmp_path / "it" / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "common_backend": "torch"})
    )
    return tmp_path / "it"


def test_sharded_and_common_parts_are_one_snapshot(folder):
    snapshot = open_foreign(folder)
    assert snapshot.format == "megatron_dist"
    assert torch.equal(snapshot.read("model.decoder.layers.mlp.linear_fc2.weight", slice(1, 2)), LAYERS[1:])
    assert torch.equal(snapshot.read("rng"), torch.arange(5))
    assert snapshot.values["iteration"] == 10
    assert snapshot.values["args.num_layers"] == 2
    assert snapshot.values["args.params_dtype"] is torch.bfloat16


def test_items_without_the_dims_of_size_one_that_the_table_adds_are_read(tmp_path):
    dcp.save({"w": torch.arange(24.0).view(1, 6, 4)}, checkpoint_id=tmp_path, no_dist=True)
    stream = io.BytesIO()
    torch.save(torch.arange(24.0).view(6, 4), stream)
    item = stream.getvalue()
    raw = (tmp_path / ".metadata").read_bytes()
    length = (tmp_path / "__0_0.distcp").stat().st_size
    assert raw.count(length.to_bytes(2, "little")) == 1
    (tmp_path / ".metadata").write_bytes(raw.replace(length.to_bytes(2, "little"), len(item).to_bytes(2, "little")))
    (tmp_path / "__0_0.distcp").write_bytes(item)
    assert torch.equal(open_foreign(tmp_path).read("w"), torch.arange(24.0).view(1, 6, 4))


def test_another_backend_is_refused(folder):
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(FormatError, match="zarr"):
        open_foreign(folder)


def test_code_in_the_common_part_is_refused(folder):
    torch.save({"args": torch.nn.Linear(1, 1)}, folder / "common.pt")
    with pytest.raises(FormatError, match="not on the list"):
        open_foreign(folder)
