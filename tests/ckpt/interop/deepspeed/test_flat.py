"""Flat partitions against a buffer that is really cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.interop.deepspeed.flat import segments_stage_2, segments_stage_3

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


def check(segments, shapes, buffers, tensors) -> None:
    for name in shapes:
        found = torch.full((tensors[name].numel(),), -1.0)
        for segment in segments[name]:
            length = segment.stop - segment.start
            assert length > 0
            found[segment.start : segment.stop] = buffers[segment.rank][segment.offset : segment.offset + length]
        assert torch.equal(found, tensors[name].reshape(-1))


def tagged(listed):
    shapes = {f"p{i}": shape for i, shape in enumerate(listed)}
    return shapes, {name: torch.rand(shape) for name, shape in shapes.items()}


@given(SHAPES, st.integers(1, 5))
def test_stage_2(listed, ranks):
    shapes, tensors = tagged(listed)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    padded = torch.cat([flat, torch.full((-flat.numel() % (2 * ranks),), 9.0)])
    buffers = list(padded.view(ranks, -1)) if padded.numel() else [padded] * ranks
    check(segments_stage_2(shapes, [len(b) for b in buffers], "x"), shapes, buffers, tensors)


@given(SHAPES, st.integers(1, 5))
def test_stage_3(listed, ranks):
    shapes, tensors = tagged(listed)
    parts = [[] for _ in range(ranks)]
    for tensor in tensors.values():
        flat = tensor.reshape(-1)
        padded = torch.cat([flat, torch.full((-flat.numel() % ranks,), 9.0)])
        for rank in range(ranks):
            parts[rank].append(padded.view(ranks, -1)[rank] if padded.numel() else padded)
    buffers = [torch.cat(mine) for mine in parts]
    check(segments_stage_3(shapes, [len(b) for b in buffers], "x"), shapes, buffers, tensors)


def test_buffers_that_are_too_short_are_refused():
    with pytest.raises(CorruptionError, match="6 elements"):
        segments_stage_2({"a": (2, 3)}, [2, 2], "x")
    with pytest.raises(CorruptionError, match="3 elements"):
        segments_stage_3({"a": (2, 3)}, [2, 3], "x")
