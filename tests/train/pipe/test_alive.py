"""A rank that fails in the middle of a step is named by all the others, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import WorldError, launch
from vescale_train.pipe.alive import SignsOfLife
from vescale_train.pipe.place import place_of

WORLD = str(Path(__file__).with_name("dying_world.py"))


@pytest.mark.distributed
@pytest.mark.parametrize(("how", "reason"), [("dies", "gone without a word"), ("raises", "a fault of the model")])
def test_all_ranks_end_with_an_error_that_names_the_one_that_failed(tmp_path, how, reason):
    with pytest.raises(WorldError, match="ended with status"):
        launch(f"{WORLD}:step", 4, deadline_seconds=60, folder=str(tmp_path), how=how)
    told = {int(path.name[5:]): path.read_text() for path in tmp_path.glob("told-*")}
    assert set(told) == ({0, 2, 3} if how == "dies" else {0, 1, 2, 3})
    for rank, text in told.items():
        assert reason in text
        assert rank == 1 or "rank 1: " in text
        assert "rank 1" in text or text.startswith("ZeroDivisionError")


def test_alone_an_error_stays_what_it_is():
    with pytest.raises(KeyError), SignsOfLife(place_of(None)).naming_the_dead():
        raise KeyError
