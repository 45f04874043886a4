"""Hypothesis strategies for worlds: meshes, layouts, free partitions, and tensors that ranks hold by them."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from tests.distributed.simulated import Spread, laid_out, replicated
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.layout import Layout
from vescale_ckpt.layout.placement import Replicate, Shard

MESHES = [(1,), (2,), (3,), (4,), (5,), (8,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (2, 2, 2), (1, 3)]


@st.composite
def layouts(draw, mesh, ndim):
    """Draw a layout of a tensor on a mesh; axes may cut the same dim, and in any order."""
    choices = [Replicate(), *(Shard(d) for d in range(ndim))]
    placements = tuple(draw(st.sampled_from(choices)) for _ in mesh)
    order = draw(st.none() | st.permutations(range(len(mesh))).map(tuple))
    return Layout(mesh, placements, order)


@st.composite
def partitions(draw, shape, world_size):
    """Draw boxes that share a tensor out, cut anywhere, each held by one rank or by several."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        wide = [d for d in range(len(shape)) if box.shape[d] > 1]
        if not wide:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(wide))
        at = draw(st.integers(1, box.shape[dim] - 1))
        low = Box(box.offset, (*box.shape[:dim], at, *box.shape[dim + 1 :]))
        offset = (*box.offset[:dim], box.offset[dim] + at, *box.offset[dim + 1 :])
        boxes += [low, Box(offset, (*box.shape[:dim], box.shape[dim] - at, *box.shape[dim + 1 :]))]
    held: list[list[Box]] = [[] for _ in range(world_size)]
    for box in boxes:
        for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1, max_size=3)):
            held[rank].append(box)
    return held


@st.composite
def shapes(draw, most_elements):
    """Draw a shape of 0 to 4 dims; some are empty, many are odd."""
    shape = draw(st.lists(st.integers(0, 40) | st.integers(1, 3) | st.integers(60, 90), max_size=4).map(tuple))
    while math.prod(shape) > most_elements:
        shape = shape[:-1]
    return shape


@st.composite
def spreads(draw, name, shape, mesh, **more):
    """Draw how the ranks of a mesh hold a tensor."""
    world_size = math.prod(mesh)
    match draw(st.integers(0, 3)):
        case 0:
            return replicated(name, shape, world_size, **more)
        case 1:
            return Spread(name, shape, draw(partitions(shape, world_size)), **more)
        case _:
            return laid_out(name, shape, draw(layouts(mesh, len(shape))), **more)
