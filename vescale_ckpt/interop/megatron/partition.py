"""How the classic files of tensor-parallel ranks make one tensor: an explicit map from names, never a guess.

A shape alone does not tell: a bias that is cut and one that is copied look alike on two ranks.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Final

from vescale_ckpt.errors import ConfigError, FormatError
from vescale_ckpt.geometry.box import Box

if TYPE_CHECKING:
    from collections.abc import Mapping


class Partition(enum.StrEnum):
    """What tensor parallelism did to a parameter."""

    ROWS = "rows"
    """Cut along dim 0 (Megatron's column-parallel layers: their weights are transposed)."""
    COLUMNS = "columns"
    """Cut along dim 1 (row-parallel layers)."""
    GATED_ROWS = "gated_rows"
    """Two tensors one above the other, each cut along dim 0: gate and up of a gated MLP."""
    COPIED = "copied"
    """Every rank has all of it, and all have the same."""


DEFAULT: Final[Mapping[str, str]] = {
    r".*word_embeddings\.weight": Partition.ROWS,
    r".*(output_layer|lm_head)\.weight": Partition.ROWS,
    r".*(linear_qkv|query_key_value)\.(weight|bias)": Partition.ROWS,
    r".*(linear_fc1|dense_h_to_4h)\.(weight|bias)": Partition.ROWS,
    r".*(linear_proj|self_attention\.dense|attention\.dense)\.weight": Partition.COLUMNS,
    r".*(linear_fc2|dense_4h_to_h)\.weight": Partition.COLUMNS,
    r".*(linear_proj|self_attention\.dense|attention\.dense|linear_fc2|dense_4h_to_h)\.bias": Partition.COPIED,
    r".*(layer_?norm|final_layernorm|input_layernorm|post_attention_layernorm|pre_mlp_layernorm|norm)[a-z_0-9]*"
    r"(\.|_)(weight|bias)": Partition.COPIED,
    r".*position_embeddings\.weight": Partition.COPIED,
    r".*router\.(weight|bias|expert_bias)": Partition.COPIED,
}
"""What Megatron's own layers do; the first regular expression that fits a whole name counts. ``linear_fc1`` of a gated
MLP is ``gated_rows``, which the stored arguments tell (``swiglu``)."""
_FC1: Final = re.compile(r".*(linear_fc1|dense_h_to_4h)\.(weight|bias)")


def partition_of(name: str, given: Mapping[str, str], *, is_gated: bool) -> Partition:
    """Return what tensor parallelism did to a parameter.

    Raises:
        FormatError: no entry speaks of it.
        ConfigError: an entry says what is no partition.
    """
    for pattern, found in (*given.items(), *DEFAULT.items()):
        if re.fullmatch(pattern, name):
            try:
                kind = Partition(found)
            except ValueError as error:
                raise ConfigError(f"cannot use {found!r} for {pattern!r}: one of {', '.join(Partition)}") from error
            is_default = pattern not in given
            return Partition.GATED_ROWS if is_gated and is_default and _FC1.fullmatch(name) else kind
    raise FormatError(
        f"cannot merge {name!r}: nothing says how tensor parallelism cut it; pass partition={{pattern: "
        f"{' | '.join(Partition)}}}",
        fqn=name,
    )


def merge_boxes(
    kind: Partition, shapes: list[tuple[int, ...]], name: str
) -> tuple[tuple[int, ...], list[list[tuple[Box, Box]]]]:
    """Return the whole shape, and per rank (box of the whole, box of the rank's own tensor).

    Raises:
        FormatError: the ranks' shapes do not fit together.
    """
    dim = 1 if kind is Partition.COLUMNS else 0
    first = shapes[0]
    rest = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    halves = 2 if kind is Partition.GATED_ROWS else 1
    if len(first) <= dim and kind is not Partition.COPIED:
        kind = Partition.COPIED  # a scalar or vector that a wider pattern has caught
    if kind is Partition.COPIED:
        if len(set(shapes)) > 1:
            raise FormatError(f"cannot merge {name!r}: it should be the same on all ranks, its shapes are {shapes}")
        return first, [[(Box.whole(first), Box.whole(first))] for _ in shapes]
    if len(rest) > 1 or any(len(shape) != len(first) or shape[dim] % halves for shape in shapes):
        raise FormatError(f"cannot merge {name!r} as {kind}: the ranks' shapes are {shapes}")
    total = sum(shape[dim] for shape in shapes)
    whole = (*first[:dim], total, *first[dim + 1 :])
    boxes: list[list[tuple[Box, Box]]] = []
    at = 0
    for shape in shapes:
        count = shape[dim] // halves
        mine = []
        for half in range(halves):
            offset, inner = [0] * len(shape), [0] * len(shape)
            offset[dim], inner[dim] = half * (total // halves) + at, half * count
            sizes = (*shape[:dim], count, *shape[dim + 1 :])
            mine.append((Box(tuple(offset), sizes), Box(tuple(inner), sizes)))
        boxes.append(mine)
        at += count
    return whole, boxes
