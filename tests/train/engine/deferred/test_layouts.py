import pytest

from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("deferred"))
    return launch("../train/engine/deferred/world.py:all_of_it", 2, deadline_seconds=150, folder=folder)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_cut_models_get_the_bits_of_one_device_late_or_from_a_checkpoint(world, name):
    for rank in world:
        differing, num_cut, differing_loaded = rank[name]
        assert differing == []
        assert differing_loaded == []
        assert num_cut >= 8


def test_they_train_as_if_they_had_been_made_at_once(world):
    for rank in world:
        at_once, late = rank["losses"]
        assert at_once == late
        assert at_once[2] < at_once[0]
