from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vescale_ckpt.errors import FormatError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.holdings import Holdings, LeafSpec, decode_boxes, decode_table

SPECS = (
    LeafSpec(("a", 0, "w"), "float32", 4, (5, 3), "tensor", "sharded"),
    LeafSpec((), "int64", 8, (), "numpy", "replicated"),
    LeafSpec(("päth", "with.dot"), "uint8", 1, (0, 7), "bytes", "per_rank", ("a", 0, "w")),
)
BOXES = [[Box((0, 0), (2, 3)), Box((4, 1), (1, 2))], [Box((), ())], []]


def made(specs=SPECS, boxes=BOXES):
    return Holdings.of(list(zip(specs, boxes, strict=True)))


def test_what_is_sent_comes_back():
    held = made()
    assert decode_table(held.table_bytes()) == SPECS
    counts, values = decode_boxes(held.box_bytes(), len(SPECS))
    assert counts.tolist() == [2, 1, 0]
    assert values.tolist() == [0, 0, 2, 3, 4, 1, 1, 2]
    assert values.dtype == counts.dtype == np.int64


def test_a_rank_that_holds_nothing_has_a_table_all_the_same():
    nothing = made(boxes=[[], [], []])
    assert nothing.table_bytes() == made().table_bytes()
    assert decode_boxes(nothing.box_bytes(), 3)[1].size == 0
    assert decode_table(Holdings.of([]).table_bytes()) == ()


def test_the_key_depends_on_everything_and_on_nothing_else():
    assert made().key() == made().key()
    others = [
        dataclasses.replace(SPECS[0], **{name: value})
        for name, value in [
            ("path", ("a", "0", "w")),
            ("dtype", "int32"),
            ("item_bytes", 8),
            ("shape", (3, 5)),
            ("kind", "numpy"),
            ("holding", "replicated"),
            ("alias_of", ()),
        ]
    ]
    keys = {made((spec, *SPECS[1:])).key() for spec in others}
    keys |= {made(boxes=[BOXES[0][::-1], *BOXES[1:]]).key(), made(boxes=[[], *BOXES[1:]]).key(), made().key()}
    assert len(keys) == len(others) + 3


def test_too_few_numbers_are_refused():
    with pytest.raises(FormatError, match="3 numbers for 4 tensors"):
        decode_boxes(np.zeros(3, "<i8").tobytes(), 4)
