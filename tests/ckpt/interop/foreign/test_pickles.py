"""Pickles as data: equal to Python's own reading for plain values, and deaf to everything else."""

from __future__ import annotations

import pickle  # noqa: TID251 -- what is read
import sys
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.foreign.pickles import Record, load_pickle, make_record
from vescale_ckpt.interop.torchsave.allowed import BASE

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(KEYS, inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
        | st.dictionaries(st.text(), inner).map(OrderedDict)
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL).filter(lambda p: p >= 2))
def test_plain_values_are_what_python_reads(value, protocol):
    found = load_pickle(pickle.dumps(value, protocol), "x", BASE)
    assert found == value


def refusal(raw: bytes) -> str:
    """What a FormatError says, or nothing where the bytes happen to be a pickle; any other error passes."""
    try:
        load_pickle(raw, "the file", BASE)
    except FormatError as error:
        return str(error)
    return ""


@given(VALUES, st.data())
def test_damage_is_a_format_error_and_nothing_else(value, data):
    raw = bytearray(pickle.dumps(value, 4))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    told = refusal(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    assert not told or told.startswith("cannot read the file")


@given(st.binary(max_size=60))
def test_noise_is_a_format_error_and_nothing_else(noise):
    told = refusal(b"\x80\x04" + noise)
    assert not told or told.startswith("cannot read the file")


class Thing:
    def __init__(self) -> None:
        self.a, self.b = 1, [2]

    def __reduce__(self):
        return Thing, (), {"a": self.a, "b": self.b}


def test_an_allowed_class_becomes_a_record_and_is_not_made():
    name = f"{Thing.__module__}.Thing"
    found = load_pickle(pickle.dumps(Thing()), "x", {name: make_record})
    assert isinstance(found, Record)
    assert (found.cls.full, found.args, found.state) == (name, (), {"a": 1, "b": [2]})


def test_any_other_name_is_refused_and_its_module_not_even_imported():
    raw = b"\x80\x04\x8c\x0cthis_is_evil\x8c\x03run\x93)R."
    with pytest.raises(FormatError, match=r"this_is_evil\.run"):
        load_pickle(raw, "x", BASE)
    assert "this_is_evil" not in sys.modules
    with pytest.raises(FormatError, match=r"builtins\.eval"):
        load_pickle(b"c__builtin__\neval\n.", "x", BASE)


def test_persistent_ids_are_refused_without_storages():
    with pytest.raises(FormatError, match="storages"):
        load_pickle(b"\x80\x02X\x01\x00\x00\x00aQ.", "x", BASE)


def test_a_deep_nest_is_read_without_a_stack_of_ours():
    raw = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    assert isinstance(load_pickle(raw + b"N" * 200_000, "x", BASE), list)
