"""Selections: what people mean by a part of a tensor, as a box of its global shape."""

from __future__ import annotations

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.geometry.box import Box


def box_of(box: Box | slice | tuple[slice, ...] | None, shape: tuple[int, ...], name: str) -> Box:
    """Return what the user means by a box of a tensor.

    Raises:
        InvalidInputError: it is outside the tensor, or a slice has a step.
    """
    whole = Box.whole(shape)
    if box is None:
        return whole
    if isinstance(box, Box):
        if box.ndim != whole.ndim or not whole.contains(box):
            raise InvalidInputError(f"cannot read {box} of '{name}': the tensor's shape is {shape}", fqn=name)
        return box
    slices = box if isinstance(box, tuple) else (box,)
    if len(slices) > len(shape):
        raise InvalidInputError(f"cannot read {len(slices)} dims of '{name}': the tensor's shape is {shape}", fqn=name)
    offset, sizes = list(whole.offset), list(whole.shape)
    for d, piece in enumerate(slices):
        start, stop, step = piece.indices(shape[d])
        if step != 1:
            raise InvalidInputError(f"cannot read '{name}' with step {step} along dim {d}: only steps of 1", fqn=name)
        offset[d], sizes[d] = start, max(0, stop - start)
    return Box(tuple(offset), tuple(sizes))
