from __future__ import annotations

import json

import pytest

from vescale_ckpt.errors import FormatError, InvalidInputError
from vescale_ckpt.format.json_text import check_json, decode_json, encode_json, take, take_number


def test_what_is_written_is_canonical_utf8():
    assert (
        encode_json({"b": [1, "é\n\u2028\x7f\x01"], "a": None}) == '{"b":[1,"é\\n\u2028\x7f\\u0001"],"a":null}'.encode()
    )


@pytest.mark.parametrize("value", [None, True, [], {}, {"a": [1, -1.5, "é\0"]}, 2**63, "\U0001f600"])
def test_there_and_back(value):
    assert decode_json(encode_json(value), "x", floats=True) == value
    assert decode_json(memoryview(bytearray(encode_json(value))), "x", floats=True) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[1,]",
        b"nul",
        b"\xff",
        b"\xef\xbb\xbf1",
        b'"\xed\xa0\x80"',
        b'"\\ud800"',
        b'["\\uDC00"]',
        b'{"\\ud800":1}',
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e999",
        b"[1] 2",
        b'{"a":1,"a":1}',
        b'[{"a":{"b":1,"b":2}}]',
        b"1" * 5000,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
        b'"\n"',
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_json_of_ours_is_a_format_error(data):
    with pytest.raises(FormatError, match="cannot read the thing"):
        decode_json(data, "the thing", floats=True)


def test_an_escaped_backslash_is_no_surrogate():
    assert decode_json(b'["\\\\ud800"]', "x", floats=True) == ["\\ud800"]
    assert decode_json(b'["\\u00e9","\\ud83d\\ude00"]', "x", floats=True) == ["é", "\U0001f600"]


@pytest.mark.parametrize("data", [b"1.0", b"1e3", b"[0.5]"])
def test_fractions_only_where_they_are_allowed(data):
    decode_json(data, "x", floats=True)
    with pytest.raises(FormatError, match="is no integer"):
        decode_json(data, "x", floats=False)


def test_take_wants_exactly_the_class():
    fields = {"a": 1, "b": True, "c": "x", "f": 0.5, "big": 10**400}
    assert take(fields, "a", int, "w") == 1
    assert take_number(fields, "a", "w") == 1.0
    assert take_number(fields, "f", "w") == 0.5
    for name, cls in [("b", int), ("a", float), ("c", dict), ("z", int)]:
        with pytest.raises(FormatError, match=f"'{name}'"):
            take(fields, name, cls, "w")
    for wrong in ("b", "c", "z", "big"):
        with pytest.raises(FormatError):
            take_number(fields, wrong, "w")
    for no_object in ([], None, "a", 1):
        with pytest.raises(FormatError, match="JSON object"):
            take(no_object, "a", int, "w")
        with pytest.raises(FormatError, match="JSON object"):
            take_number(no_object, "a", "w")


class MyInt(int):
    pass


def nested(levels):
    value = 1
    for _ in range(levels):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    "value",
    [
        (1,),
        {1: 2},
        {"\ud800": 1},
        "\ud800",
        float("nan"),
        float("inf"),
        2**64,
        -(2**63) - 1,
        MyInt(1),
        b"x",
        {1},
        nested(17),
        nested(5000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_would_not_give_back_is_refused_with_its_place(value):
    with pytest.raises(InvalidInputError, match=r"metadata\['deep'\]\[1\]"):
        check_json({"deep": [0, value]}, "metadata")


@pytest.mark.parametrize("value", [None, True, 0, 2**64 - 1, -(2**63), 0.1, "é", [], {}, nested(15)], ids=repr)
def test_what_json_gives_back_passes(value):
    check_json({"x": value}, "metadata")
    assert json.loads(encode_json({"x": value})) == {"x": value}
