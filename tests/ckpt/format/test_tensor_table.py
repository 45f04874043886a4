from __future__ import annotations

import json

import numpy as np
import pytest

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.format.document import Section, decode_document, encode_document
from vescale_ckpt.format.kinds import Kind
from vescale_ckpt.format.records import TensorRecord
from vescale_ckpt.format.tensor_table import decode_tensors, encode_tensors

MAGIC = b"\x89TEST\r\n\0"


def decode(sections):
    data = encode_document(MAGIC, (1, 0), sections)
    return decode_tensors(decode_document(data, magic=MAGIC, version=(1, 0), what="thing", known=frozenset(Kind)))[0]


def changed(tensors, kind, payload):
    return [Section(kind, payload) if section.kind == kind else section for section in encode_tensors(tensors)]


def test_there_and_back(manifest):
    assert decode(encode_tensors(manifest.tensors)) == manifest.tensors
    assert decode(encode_tensors(())) == ()


def test_a_long_table_with_every_number_of_dims():
    tensors = tuple(
        TensorRecord((f"t{i}", i), f"dtype{i % 7}", (i % 5 + 1,) * (i % 9), (1,) * (i % 9), kind=f"kind{i % 3}")
        for i in range(500)
    )
    assert decode(encode_tensors(tensors)) == tensors


def test_names_that_this_version_does_not_know_are_kept():
    """One new dtype among many must not close the snapshot; it shows when the tensor is read."""
    tensors = (TensorRecord(("a",), "float2_new", (1,), (1,), kind="future"),)
    assert decode(encode_tensors(tensors)) == tensors


def test_names_are_words():
    for bad in ("", "Float32", "a b", "9a", "x" * 65):
        with pytest.raises(CorruptionError, match="no name"):
            encode_tensors([TensorRecord(("a",), bad, (), ())])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("paths", [["model", "w"]]),
        ("paths", [1] * 7),
        ("paths", [[1.5]] * 7),
        ("paths", [[True]] * 7),
        ("paths", [[None]] * 7),
        ("paths", [[2**63]] * 7),
        ("paths", [[["a"]]] * 7),
        ("paths", {}),
        ("paths", None),
        ("dtypes", []),
        ("dtypes", ["float32"]),
        ("dtypes", ["A", "B", "C", "D"]),
        ("dtypes", [1, 2, 3, 4]),
        ("kinds", [None, None]),
        ("kinds", "tensor"),
    ],
)
def test_json_of_another_form_is_refused(manifest, field, value):
    sections = encode_tensors(manifest.tensors)
    text = json.loads(sections[0].payload)
    text[field] = value
    with pytest.raises(FormatError):
        decode(changed(manifest.tensors, Kind.TENSORS, json.dumps(text).encode()))


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        (Kind.TENSOR_DTYPE, np.zeros(6, np.uint16)),
        (Kind.TENSOR_DTYPE, np.full(7, 9, np.uint16)),
        (Kind.TENSOR_KIND, np.zeros(8, np.uint16)),
        (Kind.TENSOR_KIND, np.full(7, 65535, np.uint16)),
        (Kind.TENSOR_NDIM, np.zeros(7, np.uint8)),
        (Kind.TENSOR_NDIM, np.full(7, 255, np.uint8)),
        (Kind.TENSOR_SHAPE, np.zeros(9, np.uint64)),
        (Kind.TENSOR_SHAPE, np.full(9, 2**63, np.uint64)),
        (Kind.TENSOR_SHAPE, np.full(9, 2**64 - 1, np.uint64)),
        (Kind.TENSOR_SHAPE, np.ones(8, np.uint64)),
        (Kind.TENSOR_TILE, np.zeros(9, np.uint64)),
        (Kind.TENSOR_ALIAS, np.zeros(0, np.uint32)),
    ],
)
def test_columns_that_do_not_fit_are_refused(manifest, kind, column):
    with pytest.raises(CorruptionError):
        decode(changed(manifest.tensors, kind, column))


def test_unknown_fields_are_ignored(manifest):
    text = json.loads(encode_tensors(manifest.tensors)[0].payload) | {"new": [1]}
    assert decode(changed(manifest.tensors, Kind.TENSORS, json.dumps(text).encode())) == manifest.tensors
