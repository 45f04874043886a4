"""DCP folders that torch wrote, on 4 ranks and on one, read without torch's reader and without its pickle."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ckpt.interop.dcp.foreign_world import tagged
from tests.distributed.launch import launch
from vescale_ckpt.errors import CorruptionError, FormatError, NotFoundError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.foreign.detect import open_foreign

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp4")
    launch("../ckpt/interop/dcp/foreign_world.py:save", 4, deadline_seconds=120, folder=str(folder))
    return folder


EXPECTED = {
    "rows": tagged(7, 5),
    "columns": tagged(5, 7, dtype=torch.bfloat16),
    "both": tagged(8, 6, dtype=torch.int64),
    "copies": tagged(3, 3),
    "few": tagged(2),
    "plain": tagged(4),
    "scalar": torch.tensor(3.5),
}


@pytest.mark.filterwarnings("ignore")
def test_every_tensor_of_four_ranks_is_whole(saved):
    snapshot = open_foreign(saved / "dcp")
    assert snapshot.format == "dcp"
    for name, expected in EXPECTED.items():
        assert torch.equal(snapshot.read(name), expected), name
        assert snapshot.tensors()[name].dtype == expected.dtype
    for name, expected in torch.load(saved / "whole.pt").items():
        assert torch.equal(snapshot.read(name), expected), name
    assert snapshot.tensors()["optimizer.state.0.exp_avg"].path == ("optimizer", "state", "0", "exp_avg")


def test_any_box_is_read_across_the_ranks_chunks(saved):
    snapshot = open_foreign(saved / "dcp")
    assert torch.equal(snapshot.read("both", Box((3, 1), (4, 4))), EXPECTED["both"][3:7, 1:5])
    assert torch.equal(snapshot.read("columns", (slice(2, 4), slice(1, 6))), EXPECTED["columns"][2:4, 1:6])
    assert snapshot.read("rows", slice(7, 7)).shape == (0, 5)


def test_plain_values_come_without_unpickling(saved):
    seen: list = []
    watching = [True]
    sys.addaudithook(lambda event, args: seen.append(args) if watching and event.startswith("pickle.") else None)
    values = dict(open_foreign(saved / "dcp").values)
    watching.clear()
    assert not seen
    assert values["step"] == 7
    assert values["nest.a"] == [1, 2.5, None]
    assert values["nest.b"] == "text"


@pytest.fixture
def small(tmp_path):
    dcp.save({"w": tagged(4, 4), "n": 3}, checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


@pytest.mark.filterwarnings("ignore")
class TestDamage:
    def test_a_missing_file_is_named(self, small):
        (small / "__0_0.distcp").unlink()
        with pytest.raises(NotFoundError, match="__0_0"):
            open_foreign(small)

    def test_a_cut_file_is_found_when_it_is_opened(self, small):
        data = (small / "__0_0.distcp").read_bytes()
        (small / "__0_0.distcp").write_bytes(data[:-1])
        with pytest.raises(CorruptionError, match="it was cut"):
            open_foreign(small)

    def test_an_item_that_is_no_archive_is_refused(self, small):
        size = (small / "__0_0.distcp").stat().st_size
        (small / "__0_0.distcp").write_bytes(bytes(size))
        with pytest.raises(FormatError, match="no whole zip"):
            open_foreign(small).read("w")

    def test_other_boxes_than_the_table_says_are_refused(self, small, tmp_path):
        dcp.save({"w": tagged(4, 5), "n": 3}, checkpoint_id=tmp_path / "y", no_dist=True)
        (tmp_path / "y" / ".metadata").write_bytes((small / ".metadata").read_bytes())
        with pytest.raises(FormatError):
            open_foreign(tmp_path / "y").read("w")
