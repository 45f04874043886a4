"""Pickles that are written here, read by Python and by torch."""

from __future__ import annotations

import pickle  # noqa: TID251 -- the reader that must agree
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.interop.foreign.pickles import load_pickle
from vescale_ckpt.interop.torchsave.allowed import BASE, DTYPES
from vescale_ckpt.interop.torchsave.encode import encode_pickle

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


@given(VALUES)
def test_python_and_this_package_read_what_was_written(value):
    raw = encode_pickle(value)
    assert pickle.loads(raw) == value  # noqa: S301 -- what was written right here
    assert load_pickle(raw, "x", BASE) == value


def test_what_torch_has_of_its_own():
    value = [torch.float32, torch.float8_e5m2, torch.Size([2, 3]), torch.Size([])]
    raw = encode_pickle(value)
    assert pickle.loads(raw) == value  # noqa: S301 -- what was written right here
    assert load_pickle(raw, "x", BASE, constants=DTYPES) == value


def test_long_containers_are_written_in_batches():
    value = {"list": list(range(5000)), "dict": {i: str(i) for i in range(5000)}}
    assert pickle.loads(encode_pickle(value)) == value  # noqa: S301 -- what was written right here


@pytest.mark.parametrize("value", [OrderedDict(a=1), object(), lambda: 0, torch.ones(1), 1 << 5000])
def test_anything_else_is_refused(value):
    with pytest.raises(InvalidInputError):
        encode_pickle({"x": [value]})


def test_a_loop_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(InvalidInputError, match="without end"):
        encode_pickle(loop)
