from __future__ import annotations

import copy

import pytest

from vescale_ckpt.errors import AccessDeniedError, RankFailureError, StorageError
from vescale_ckpt.saving.phases import naming


def test_an_error_says_what_it_interrupted():
    with pytest.raises(StorageError) as caught, naming("writing", "run@2", 3):
        raise StorageError("cannot put 'k'", retryable=True, key="k")
    error = caught.value
    assert str(error) == error.message == "cannot put 'k' - while writing run@2 on rank 3"
    assert error.context == {"key": "k", "phase": "writing", "snapshot": "run@2", "rank": 3}
    assert error.retryable
    assert str(copy.copy(error)) == str(error)


def test_one_that_names_a_phase_is_left_as_it_is():
    told = RankFailureError("rank 1 failed", failures={1: "no"}, phase="staging")
    with pytest.raises(RankFailureError) as caught, naming("committing", "run@2", 0):
        raise told
    assert caught.value is told
    assert (told.message, told.context) == ("rank 1 failed", {"phase": "staging"})
    same = AccessDeniedError("no")
    for _ in range(2):
        with pytest.raises(AccessDeniedError), naming("writing", "run@2", 0):
            raise same
    assert same.message.count("while") == 1


def test_errors_of_others_pass_through():
    with pytest.raises(ZeroDivisionError), naming("writing", "run@2", 0):
        1 / 0  # noqa: B018
