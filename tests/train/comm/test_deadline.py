from __future__ import annotations

import pytest

from vescale_train.comm import deadline
from vescale_train.errors import InvalidInputError


def test_a_process_alone_needs_no_deadline():
    with deadline("alone", 0.1):
        pass


def test_a_deadline_is_positive():
    with pytest.raises(InvalidInputError, match="the deadline of 'x' must be positive"), deadline("x", 0):
        pass
