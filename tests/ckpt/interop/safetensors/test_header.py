from __future__ import annotations

import json
import struct

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt.errors import CorruptionError, FormatError, InvalidInputError
from vescale_ckpt.interop.safetensors import header as header_module
from vescale_ckpt.interop.safetensors.header import (
    MAX_HEADER_BYTES,
    SafetensorsHeader,
    TensorEntry,
    encode_header,
    header_length,
    parse_header,
)

WHAT = "/models/x.safetensors"


def entry(shape, start, stop, dtype="F32", **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop], **more}


def parse(value, data_bytes=16):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_header(text, data_bytes, WHAT)


def test_a_header_is_read_in_its_order():
    header = parse({"b": entry([2], 8, 16), "__metadata__": {"format": "pt"}, "a": entry([2, 1], 0, 8)})
    assert list(header.tensors) == ["b", "a"]
    assert header.tensors["a"] == TensorEntry("a", "F32", (2, 1), 0, 8)
    assert header.metadata == {"format": "pt"}
    assert header.num_bytes == 16


def test_what_is_written_is_read_back_and_padded():
    entries = [TensorEntry("x", "F64", (2,), 0, 16), TensorEntry("löch.ß", "BOOL", (), 16, 17)]
    data = encode_header(entries, {"format": "pt", "ä": '"\\'})
    assert len(data) % 8 == 0
    header = parse_header(data[8:], 17, WHAT)
    assert header == SafetensorsHeader({e.name: e for e in entries}, {"format": "pt", "ä": '"\\'}, len(data))
    assert safetensors.deserialize(data + bytes(17))


def test_no_metadata_is_no_entry():
    assert b"__metadata__" not in encode_header([TensorEntry("x", "U8", (1,), 0, 1)], {})


def test_a_file_without_tensors():
    assert parse({}, 0).tensors == {}
    assert parse({"__metadata__": {}}, 0).metadata == {}


def test_names_that_look_like_fields_are_names():
    header = parse(
        {name: entry([1], 4 * i, 4 * i + 4) for i, name in enumerate(["dtype", "shape", "data_offsets"])}, 12
    )
    assert list(header.tensors) == ["dtype", "shape", "data_offsets"]
    header = parse({"__metadata__": {"dtype": "a", "shape": "b", "data_offsets": "c"}}, 0)
    assert header.metadata == {"dtype": "a", "shape": "b", "data_offsets": "c"}


def test_empty_tensors_take_no_bytes():
    header = parse({"a": entry([0, 7], 0, 0), "b": entry([4], 0, 16), "c": entry([0], 16, 16)})
    assert header.tensors["a"].num_bytes == header.tensors["c"].num_bytes == 0


HUGE = b"1" * 5000

DAMAGED = {
    "a shape and a range that disagree": ({"w": entry([1000, 1000], 0, 4)}, 4),
    "a range past the end": ({"w": entry([4], 100, 116)}, 16),
    "data that were cut": ({"w": entry([4], 0, 16)}, 9),
    "bytes after the last tensor": ({"w": entry([4], 0, 16)}, 17),
    "bytes and no tensors": ({}, 1),
    "a hole": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12),
    "an overlap": ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12),
    "two tensors of the same bytes": ({"a": entry([4], 0, 16), "b": entry([4], 0, 16)}, 16),
    "an empty tensor past the end": ({"a": entry([4], 0, 16), "b": entry([0], 20, 20)}, 16),
    "a tensor of no whole bytes": ({"a": entry([3], 0, 1, "F4")}, 1),
    "a product beyond 64 bits": ({"a": entry([2**62, 2**62], 0, 16)}, 16),
}

REFUSED = {
    "no JSON": b"{nope",
    "nothing": b"",
    "a list": b"[]",
    "a text": b'"a"',
    "a space first": b' {"a": 1}',
    "not UTF-8": b'{"\xff": 1}',
    "more than one value": b"{}{}",
    "no number": b'{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}',
    "a float": b'{"w": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}',
    "an integer of thousands of digits": b'{"w": {"dtype": "F32", "shape": [' + HUGE + b'], "data_offsets": [0, 16]}}',
    "bottomless lists": b'{"w":' + b"[" * 200_000,
    "bottomless objects": b'{"w":' * 200_000,
    "a lone surrogate": b'{"\\ud800": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
    "a lone surrogate in the metadata": b'{"__metadata__": {"a": "\\udfff"}}',
    "a name twice": b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"w":{"dtype":"F32","shape":[4],'
    b'"data_offsets":[0,16]}}',
    "a field twice": b'{"w":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "metadata twice": b'{"__metadata__":{"a":"1","a":"2"}}',
    "a tensor's fields alone": entry([4], 0, 16),
    "an unknown dtype": {"w": entry([4], 0, 16, "F99")},
    "a dtype in lower case": {"w": entry([4], 0, 16, "f32")},
    "a dtype that is no text": {"w": entry([4], 0, 16, 32)},
    "a dtype that is a tensor": {"w": entry([4], 0, 16, entry([4], 0, 16))},
    "a negative size": {"w": entry([-4], 0, 16)},
    "a negative offset": {"w": entry([4], -16, 0)},
    "true as a size": {"w": entry([True, 4], 0, 16)},
    "a size of 64 bits": {"w": entry([2**63, 0], 0, 0)},
    "no list of sizes": {"w": entry("4", 0, 16)},
    "nested sizes": {"w": entry([[4]], 0, 16)},
    "65 dims": {"w": entry([1] * 64 + [4], 0, 16)},
    "a range backwards": {"w": entry([4], 16, 0)},
    "three offsets": {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}},
    "one offset": {"w": {"dtype": "F32", "shape": [4], "data_offsets": [16]}},
    "no offsets": {"w": {"dtype": "F32", "shape": [4]}},
    "a field too many": {"w": entry([4], 0, 16, more=1)},
    "null for a tensor": {"w": None},
    "a list for a tensor": {"w": [0, 16]},
    "nothing for a tensor": {"w": {}},
    "a text for a tensor": {"w": "F32"},
    "numbers in the metadata": {"__metadata__": {"a": 1}},
    "metadata in metadata": {"__metadata__": {"__metadata__": {}}},
    "metadata that are a list": {"__metadata__": ["a"]},
    "a tensor as metadata": {"__metadata__": entry([4], 0, 16)},
}


@pytest.mark.parametrize("case", DAMAGED)
def test_refused_as_damaged(case):
    value, data_bytes = DAMAGED[case]
    with pytest.raises(CorruptionError, match=WHAT):
        parse(value, data_bytes)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_as_no_header(case):
    with pytest.raises(FormatError, match=WHAT) as caught:
        parse(REFUSED[case])
    assert not isinstance(caught.value, CorruptionError)
    assert len(str(caught.value)) < 500


LENIENT = {
    "a name twice",
    "a field too many",
    "a field twice",
    "a lone surrogate in the metadata",
    "metadata twice",
    "65 dims",
}
"""What the format's own library lets pass."""


@pytest.mark.parametrize("case", sorted(REFUSED.keys() - LENIENT))
def test_the_library_refuses_it_too(case):
    value = REFUSED[case]
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(struct.pack("<Q", len(text)) + text + bytes(16))


def test_values_do_not_pile_up_before_the_end_is_seen():
    objects = [b'{"a":"b"},', b"{},", b'{"dtype":1},', b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}},']
    for inner in objects:
        with pytest.raises(FormatError) as caught:
            parse(b'{"x":[' + inner * 10 + b"!")  # the flood ends in nonsense, which is never reached
        assert "Expecting value" not in str(caught.value)


def test_a_name_twice_among_many_is_found_in_no_time():
    one = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = [*range(20_000), 19_999]
    with pytest.raises(FormatError, match="'19999' comes twice"):
        parse(b"{" + b",".join(one % name for name in names) + b"}", 0)


def test_header_length():
    assert header_length(struct.pack("<Q", 10), 18, WHAT) == 10
    for first, size in [(b"", 0), (b"\x01" * 7, 7), (struct.pack("<Q", 11), 18), (struct.pack("<Q", 1), 8)]:
        with pytest.raises(CorruptionError, match=WHAT):
            header_length(first, size, WHAT)
    with pytest.raises(FormatError, match="zip archive"):
        header_length(b"PK\x03\x04\0\0\0\0", 204, WHAT)
    with pytest.raises(FormatError, match="the format allows 100000000"):
        header_length(struct.pack("<Q", MAX_HEADER_BYTES + 1), 2**40, WHAT)
    with pytest.raises(FormatError, match="the format allows 100000000"):
        header_length(b"\xff" * 8, 2**40, WHAT)


def test_a_header_that_is_too_long_is_not_written(monkeypatch):
    monkeypatch.setattr(header_module, "MAX_HEADER_BYTES", 64)
    with pytest.raises(InvalidInputError, match="write smaller files"):
        encode_header([TensorEntry("x" * 64, "F32", (4,), 0, 16)], {})


GOOD = json.dumps({"__metadata__": {"k": "v"}, "a": entry([2, 1], 0, 8), "b": entry([2], 8, 16)}).encode()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_is_changed_in_a_header_what_we_accept_the_library_accepts(data):
    text = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        kind = data.draw(st.sampled_from(["set", "insert", "delete"]))
        byte = data.draw(st.sampled_from(list(b'{}[]",:0123456789 \\abF-.\xff\x00')))
        if kind == "set":
            text[at] = byte
        elif kind == "insert":
            text.insert(at, byte)
        elif len(text) > 1:
            del text[at]
    try:
        header = parse_header(bytes(text), 16, WHAT)
    except FormatError:
        return
    found = dict(safetensors.deserialize(struct.pack("<Q", len(text)) + text + bytes(16)))
    assert {name: tuple(fields["shape"]) for name, fields in found.items()} == {
        name: tensor.shape for name, tensor in header.tensors.items()
    }


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_refused_in_our_words(text):
    for head in (b"", b"{"):
        try:
            parse_header(head + text, 16, WHAT)
        except FormatError:
            continue
