"""One training on every product of dp, tp and zero at 1, 2 and 4 ranks, and on from what another mesh has saved."""

from __future__ import annotations

import pytest

from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed
DROPOUT = 0.1
SOURCES = ("dp=1 zero 0 exact", "dp=2,tp=2 zero 1 exact", "dp=4 zero 1 fast")
"""Saved by these."""
ONE = {mode: f"dp=1 zero 0 {mode}" for mode in ("exact", "fast")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return what every mesh gave on rank 0, where all ranks gave the same."""
    folder = str(tmp_path_factory.mktemp("meshes"))
    found = {}
    source = []
    for num_ranks in (1, 4, 2):
        by_rank = launch(
            "../train/engine/world.py:train_all",
            num_ranks,
            deadline_seconds=200,
            folder=folder,
            source=source,
            dropout=DROPOUT,
        )
        assert all(other == by_rank[0] for other in by_rank)
        found |= by_rank[0]
        source = [name for name in by_rank[0] if name in SOURCES]
    return found


def by_kind(results, mode, *, resumed):
    return {name: found for name, found in results.items() if mode in name and (" from " in name) == resumed}


def test_exact_mode_gives_the_bits_of_one_device_on_every_mesh(results):
    one = results[ONE["exact"]]
    meshes = by_kind(results, "exact", resumed=False)
    assert len(meshes) == 3 + 4 + 10
    for name, found in meshes.items():
        assert found == one, name


def test_fast_mode_is_within_a_millionth(results):
    one = results[ONE["fast"]]
    for name, found in by_kind(results, "fast", resumed=False).items():
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-6), name
        assert found["evaluated"] == pytest.approx(one["evaluated"], rel=1e-6), name
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-5), name


def test_the_training_learns_and_is_clipped(results):
    one = results[ONE["exact"]]
    assert one["losses"][-1] < one["losses"][0] - 0.1
    assert one["norm"] > 0.5


def test_on_from_another_mesh_to_the_same_bits(results):
    one = results[ONE["exact"]]
    resumed = by_kind(results, "exact", resumed=True)
    assert len(resumed) == 10
    for name, found in resumed.items():
        assert found["losses"] == one["losses"][2:], name
        assert found["digest"] == one["digest"], name
        assert found["resumed"] == [2, 4]


def test_on_from_another_mesh_within_a_millionth(results):
    one = results[ONE["fast"]]
    for name, found in by_kind(results, "fast", resumed=True).items():
        assert found["losses"] == pytest.approx(one["losses"][2:], rel=1e-6), name
