"""Meshes of real ranks: ours by name, and veScale's global one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORLD = str(Path(__file__).with_name("world.py"))


@pytest.fixture(scope="module")
def answers():
    return launch(f"{WORLD}:main", 4, deadline_seconds=60)


@pytest.mark.distributed
def test_a_mesh_answers_by_name(answers):
    for rank, found in enumerate(answer["own"] for answer in answers):
        dp, tp = divmod(rank, 2)
        assert found["names"] == ["dp", "fsdp", "tp"]
        assert found["shape"] == [2, 1, 2]
        assert found["coordinate"] == {"dp": dp, "fsdp": 0, "tp": tp}
        assert found["any order"] == [["dp", "tp"], [[0, 1], [2, 3]]]
        assert found["slice"] == [2 * dp, 2 * dp + 1]
        assert found["all"]
        assert found["absent"]
        assert found["sizes"] == [2, 1, 2, 1]
        assert found["batch"] == [tp, tp + 2]
        assert found["batch of a slice"]
        assert found["lookup"] == [dp, tp, 0]
        assert "tp=3 asked for 3" in found["refused"]


@pytest.mark.distributed
def test_the_global_mesh_answers_under_its_familiar_names(answers):
    for rank, found in enumerate(answer["vescale"] for answer in answers):
        pp, tp = divmod(rank, 2)
        assert found["shape"] == [2, 1, 2]
        assert found["ndim"] == 3
        assert found["coordinate"] == [pp, 0, tp]
        assert found["another"] == [1, 0, 1]
        assert found["sizes"] == [2, 1, 2, 2, 2]
        assert found["ranks"] == [pp, 0, tp, tp, pp]
        assert found["meshes"] == [[tp, tp + 2], [rank], [2 * pp, 2 * pp + 1]]
        assert found["all"] == [[[0, 2], [1, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]]]
        assert found["groups"] == [[rank], [2 * pp, 2 * pp + 1]]
        assert found["stages"] == [pp == 0, pp == 1]
        assert found["slice"] == [[0, 1], [2, 3]]
