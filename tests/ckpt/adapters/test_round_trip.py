"""Any nested state comes back: into a copy with other contents, and out of nothing."""

from __future__ import annotations

import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vescale_ckpt.adapters.fresh import fresh_state

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size((1, 2))]),
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64])


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    base = torch.arange(1 + 2 * int(torch.tensor([*shape, 1]).prod()))
    value = base[1::2].reshape(shape).to(draw(DTYPES))
    return value.mT if value.ndim > 1 and draw(st.booleans()) else value


def containers(children):
    keys = st.one_of(st.text(max_size=4), st.integers(-3, 3))
    return st.one_of(
        st.dictionaries(keys, children, max_size=4),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
    )


STATES = st.dictionaries(st.text(max_size=4), st.recursive(VALUES | tensors(), containers, max_leaves=12), max_size=4)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def spoil(state):
    """Return the state with other numbers in its tensors and None for its plain values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: spoil(value) for key, value in state.items()}
    if isinstance(state, list | tuple) and type(state) is not torch.Size:
        return type(state)(spoil(value) for value in state)
    return None


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=STATES)
def test_a_state_comes_back_into_a_spoiled_copy_and_out_of_nothing(memory, state):
    stored, before = memory.save(state), copy.deepcopy(state)
    fresh = fresh_state(stored.tree, stored.tensors, rank=0)
    memory.fill(fresh, stored)
    assert same(fresh.state, state)
    target = spoil(state)
    restore = memory.load(stored, target)
    assert same(target, state)
    assert restore.taken.all()
    assert same(before, state)
