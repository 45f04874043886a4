from __future__ import annotations

import enum

import numpy as np
import pytest

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.keys import MAX_INT_KEY, MIN_INT_KEY, check_key, is_unicode, place, type_name


class Name(enum.StrEnum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("key", ["", "a.b", "é", "\0", "\U0001f600", 0, -1, MAX_INT_KEY, MIN_INT_KEY])
def test_plain_keys_pass_unchanged(key):
    assert check_key(key) is key


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (True, "bool"),
        (1.0, "float"),
        (None, "NoneType"),
        (("a", 1), "tuple"),
        (b"a", "bytes"),
        (np.int64(1), "numpy.int64"),
        (Name.A, "Name"),
        (Number.ONE, "Number"),
        (np.str_("a"), "numpy.str_"),
        (MAX_INT_KEY + 1, "64 bits"),
        (MIN_INT_KEY - 1, "64 bits"),
        ("a\ud800", "surrogate"),
    ],
)
def test_other_keys_are_refused_with_path_and_way_out(key, says):
    with pytest.raises(InvalidInputError) as caught:
        check_key(key, ("model", 0))
    assert "'model.0'" in caught.value.message
    assert says in caught.value.message
    assert "use " in caught.value.message or "decode" in caught.value.message
    assert caught.value.context["fqn"] == "model.0"


def test_the_repr_of_a_strange_key_is_never_asked_for():
    class Bomb:
        def __repr__(self) -> str:
            raise RuntimeError("boom")

    with pytest.raises(InvalidInputError, match="Bomb"):
        check_key(Bomb())


def test_unicode_is_what_utf8_can_write():
    assert is_unicode("plain")
    assert is_unicode("\U0001f600")
    assert not is_unicode("\ud83d")
    assert not is_unicode("\ud83d\ude00")  # two halves are not the whole


def test_names_for_messages():
    assert type_name(1) == "int"
    assert type_name(np.float32(1)) == "numpy.float32"
    assert place(()) == "the top of the state"
    assert place(("a", 0)) == "'a.0'"
