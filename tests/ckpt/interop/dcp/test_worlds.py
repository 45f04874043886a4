"""torch.distributed.checkpoint on the store, in real worlds: FSDP2, asynchronous saves, cached plans, resharding."""

from __future__ import annotations

import pytest

import vescale_ckpt as vc
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[str, list]:
    folder = str(tmp_path_factory.mktemp("dcp"))
    return folder, launch("dcp_world.py:save", 4, deadline_seconds=120, folder=folder)


@pytest.fixture(scope="module")
def loaded(saved) -> dict[int, list[dict]]:
    """What loads on worlds of different sizes cost; that every bit was right, the worlds have checked."""
    folder, _ = saved
    return {n: launch("dcp_world.py:load", n, deadline_seconds=120, folder=folder) for n in (4, 3)}


def test_the_coordinator_commits_and_the_snapshots_are_whole(saved):
    folder, refs = saved
    assert refs == [["run@1"], [], [], []]
    store = vc.open_store(f"{folder}/store")
    for name in ("run@1", "run@10", "run@30", "cached@22", "rows@1"):
        assert store[name].verify().ok
    assert store["run@1"].state_dict()["extra"] == {"betas": (0.9, 0.95)}
    names = {name for name in store["run@1"].tensors() if name.startswith("model.")}
    assert "model.up.weight" in names
    assert "model.calls" in names


def test_ranks_read_what_they_need_and_no_more(loaded):
    for found in loaded[4]:
        assert found["here"] == found["needed"]


def test_torchs_own_reader_takes_whole_shards_for_columns(loaded):
    for found in loaded[4]:
        assert found["torch"] > 3.9 * found["needed"]


def test_another_world_size_loads_everything(loaded):
    assert len(loaded[3]) == 3
    for found in loaded[3]:
        assert found["here"] <= 2 * found["needed"]  # a third of the columns is on no tile line
