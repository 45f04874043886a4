import pytest
from torch import nn

from vescale_train.engine.progress import TrainProgress, progress_of
from vescale_train.errors import InvalidInputError


def test_a_model_carries_its_progress_and_nothing_of_it_shows_in_its_state():
    model = nn.Linear(1, 1)
    progress_of(model).step += 2
    assert progress_of(model).step == 2
    assert progress_of(nn.Linear(1, 1)).step == 0
    assert set(model.state_dict()) == {"weight", "bias"}


def test_progress_is_kept():
    progress = TrainProgress()
    progress.load_state_dict({"step": 7})
    assert progress.state_dict() == {"step": 7}


@pytest.mark.parametrize("state", [{}, {"step": -1}, {"step": 1.0}, {"step": True}])
def test_what_is_no_progress_is_refused(state):
    with pytest.raises(InvalidInputError, match="not the progress"):
        TrainProgress().load_state_dict(state)
