from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp._flat_param import FlatParamHandle

from vescale_ckpt.adapters import fsdp1
from vescale_ckpt.adapters.fsdp1 import FlatRange
from vescale_ckpt.errors import InvalidInputError


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), data=st.data())
def test_the_views_of_all_ranks_are_the_parameter(shape, data):
    shape = tuple(shape)
    numel = math.prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    full = torch.arange(numel).reshape(shape)
    out = torch.full(shape, -1)
    for start, stop in itertools.pairwise(cuts):
        part = FlatRange(shape, start, stop)
        local = full.flatten()[start:stop].clone()
        assert part.fits(local)
        assert part.numel == stop - start
        view = part.view_of(local)
        assert view.global_shape == shape
        for box, (_, piece) in zip(view.boxes, view.pieces, strict=True):
            assert (out[box.slices] == -1).all()
            out[box.slices] = piece
            piece[...] = -2
        assert (local == -2).all(), "views of the memory, not copies of it"
    assert torch.equal(out, full)


def test_what_has_another_shape_is_no_part_of_it():
    part = FlatRange((4, 3), 2, 7)
    assert not any(part.fits(other) for other in (torch.zeros(()), torch.zeros(4), torch.zeros(5, 1), 3, None))
    assert FlatRange((4,), 0, 0).fits(torch.zeros(0))
    assert FlatRange((4,), 0, 0).view_of(torch.zeros(0)).pieces == ()


def handle(**more):
    """As much of a handle as is looked at."""
    inside, outside = torch.zeros(3), torch.zeros(0)
    infos = [
        SimpleNamespace(in_shard=True, intra_param_start_idx=1, intra_param_end_idx=3),
        SimpleNamespace(in_shard=False, intra_param_start_idx=None, intra_param_end_idx=None),
    ]
    flat = SimpleNamespace(
        _params=[inside, outside],
        _shapes=[torch.Size([2, 4]), torch.Size([5])],
        _shard_param_infos=infos,
        _param_extensions=[None, None],
        _contiguities=[True, True],
    )
    usual = {
        "flat_param": flat,
        "uses_sharded_strategy": True,
        "_use_orig_params": True,
        "_training_state": SimpleNamespace(name="IDLE"),
        "_skipped_use_sharded_views": False,
    }
    return SimpleNamespace(**(usual | more))


def module(found):
    return SimpleNamespace(_handle=found, _fsdp_wrapped_module="inside")


def test_ranges_are_of_the_elements_that_are_here():
    made = handle()
    first, second = made.flat_param._params
    ranges = {id(first): FlatRange((2, 4), 1, 4), id(second): FlatRange((5,), 0, 0)}
    assert fsdp1.flat_ranges(module(made)) == ranges
    assert fsdp1.flat_ranges(module(handle(uses_sharded_strategy=False))) == {}
    assert fsdp1.flat_ranges(module(None)) == {}
    made.flat_param._params[0] = torch.zeros(2, 4)
    with pytest.raises(InvalidInputError, match="summon_full_params"):
        fsdp1.flat_ranges(module(made))


def test_what_was_left_gathered_is_brought_back_and_nothing_else():
    done = []
    gathered = {"reshard": done.append, "post_reshard": lambda: done.append("post")}
    assert fsdp1.settle(module(handle(**gathered, needs_unshard=lambda: False))) == "inside"  # before the first forward
    assert done == []
    made = handle(**gathered, needs_unshard=lambda: True)
    made.flat_param._full_param_padded = torch.zeros(8)
    fsdp1.settle(module(made))
    assert done == []
    made.needs_unshard = lambda: False
    fsdp1.settle(module(made))
    assert done == [True, "post"]
    assert fsdp1.settle(module(None)) == "inside"


@pytest.mark.parametrize(
    ("more", "way_out"),
    [
        ({"_use_orig_params": False}, "use_orig_params=True"),
        ({"_training_state": SimpleNamespace(name="FORWARD")}, "between two steps"),
        ({"_skipped_use_sharded_views": True}, "between two steps"),
    ],
)
def test_what_has_no_honest_names_or_values_is_refused(more, way_out):
    with pytest.raises(InvalidInputError, match=way_out):
        fsdp1.settle(module(handle(**more)))


def test_parameters_of_other_kinds_are_refused():
    for name, value, way_out in (("_param_extensions", [object()], "FSDP2"), ("_contiguities", [False], "contiguous")):
        made = handle()
        setattr(made.flat_param, name, value)
        with pytest.raises(InvalidInputError, match=way_out):
            fsdp1.settle(module(made))


def test_torch_still_has_what_is_asked_of_it():
    for name in ("uses_sharded_strategy", "needs_unshard", "reshard", "post_reshard", "_skipped_use_sharded_views"):
        assert hasattr(FlatParamHandle, name), f"torch {torch.__version__} has no {name}: look at fsdp1.py again"
