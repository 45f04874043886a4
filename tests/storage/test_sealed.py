from __future__ import annotations

import json
import math
import uuid

import pytest

from vescale_storage import loop, sealed
from vescale_storage.backends import open_backend
from vescale_storage.digest import hexdigest
from vescale_storage.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    FormatError,
    InternalError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from vescale_storage.sealed import put_once, read_bounded, read_sealed, seal, unseal
from vescale_storage.wrappers.faults import FaultBackend

FIELDS = {"name": "snow ☃ 🚀", "number": 7, "seconds": 1.5, "digest": "ab" * 4, "texts": {"a": "b"}}


def memory():
    return open_backend(f"memory://{uuid.uuid4().hex}")


def sealed_text(text: str | bytes) -> bytes:
    """Return a valid seal around what need not be a valid record: the text after the check's digits."""
    rest = b'",' + (text.encode() if isinstance(text, str) else text)
    return b'{"check":"' + hexdigest(rest).encode() + rest


def opened(text: str | bytes):
    return unseal(sealed_text(text), kind="thing", key="where/it/is")


def test_a_record_is_json_with_its_check_first():
    data = seal("thing", FIELDS)
    assert data[:10] == b'{"check":"'
    assert data[10:74].decode() == hexdigest(data[74:])
    assert json.loads(data) == {"check": data[10:74].decode(), "kind": "thing", "format": 1, **FIELDS}
    assert data.isascii()
    assert data == seal("thing", dict(FIELDS))


def test_fields_come_back_with_their_types():
    fields = unseal(seal("thing", FIELDS), kind="thing", key="k")
    assert fields.text("name", 20) == FIELDS["name"]
    assert fields.integer("number", 0, 7) == 7
    assert fields.seconds("seconds") == 1.5
    assert fields.seconds("number") == 7.0
    assert fields.hex("digest", 8) == "abababab"
    assert fields.texts("texts", 1, 1) == {"a": "b"}
    fields.expect("number", 7)


def test_every_flipped_byte_every_cut_and_every_addition_is_corruption_that_names_the_key():
    data = seal("thing", FIELDS)
    damaged = [
        data[:i] + bytes([data[i] ^ bits]) + data[i + 1 :] for i in range(len(data)) for bits in (1, 32, 128, 255)
    ]
    damaged += [data[:i] for i in range(len(data))] + [data[i:] for i in range(1, len(data))]
    damaged += [data + b"\x00", data + b"\n", b" " + data, data + data, b""]
    for bad in damaged:
        with pytest.raises(CorruptionError, match="'where/it/is'"):
            unseal(bad, kind="thing", key="where/it/is")


def test_a_record_that_is_too_long_to_be_read_is_never_written_nor_accepted():
    with pytest.raises(InternalError):
        seal("thing", {"text": "x" * sealed.MAX_RECORD_BYTES})
    with pytest.raises(CorruptionError):
        opened('"kind":"thing","format":1,"text":"' + "x" * sealed.MAX_RECORD_BYTES + '"}')
    assert opened('"kind":"thing","format":1,"text":"' + "x" * 60_000 + '"}')


def test_unknown_fields_are_ignored_and_a_newer_format_is_refused():
    assert opened('"kind":"thing","format":1,"new":{"a":[1,2.5,null,true]},"text":"x"}').text("text", 1) == "x"
    with pytest.raises(UnsupportedVersionError, match=r"format 2.*knows 1"):
        opened('"kind":"thing","format":2}')
    with pytest.raises(CorruptionError, match="kind"):
        opened('"kind":"other","format":1}')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "}",
        '"kind":"thing"',
        '"kind":"thing","format":1}}',
        '"kind":"thing","format":1}garbage',
        '"format":1}',
        '"kind":"thing"}',
        '"kind":5,"format":1}',
        '"kind":"thing","format":true}',
        '"kind":"thing","format":1.0}',
        '"kind":"thing","format":0}',
        '"kind":"thing","format":"1"}',
        '"kind":"thing","format":1,"kind":"thing"}',
        '"kind":"thing","format":1,"check":"x"}',
        '"kind":"thing","format":1,"x":{"a":1,"a":1}}',
        '"kind":"thing","format":1,"x":NaN}',
        '"kind":"thing","format":1,"x":-Infinity}',
        '"kind":"thing","format":1,"x":1e999}',
        '"kind":"thing","format":1,"x":' + "9" * 50_000 + "}",
        '"kind":"thing","format":1,"x":' + "[" * 30_000 + "]" * 30_000 + "}",
        '"kind":"thing","format":1,"x":' + '{"a":' * 10_000 + "1" + "}" * 10_001,
        '"kind":"thing","format":1,"x":"\t"}',
        '"kind":"thing","format":1,"x":"é"}',
        b'"kind":"thing","format":1,"x":"\xff"}',
        b'"kind":"thing","format":1,"x":"\x00"}',
    ],
    ids=lambda text: ascii(text)[:60],
)
def test_json_that_no_writer_makes_is_a_format_error(text):
    with pytest.raises(FormatError, match="'where/it/is'"):
        opened(text)


BAD_FIELDS = [
    ("text", '"' + "x" * 9 + '"'),
    ("text", "5"),
    ("text", "null"),
    ("text", '"\\ud800"'),
    ("hex", '"AB"'),
    ("hex", '"abc"'),
    ("hex", '"zz"'),
    ("hex", "12"),
    ("integer", "-1"),
    ("integer", "11"),
    ("integer", "1.0"),
    ("integer", "true"),
    ("integer", '"1"'),
    ("integer", "null"),
    ("seconds", "-1"),
    ("seconds", "1e15"),
    ("seconds", "true"),
    ("seconds", '"1"'),
    ("texts", "[]"),
    ("texts", '{"a":1}'),
    ("texts", '{"a":"x","b":"y","c":"z"}'),
    ("texts", '{"a":"xxxxxxxxx"}'),
    ("texts", '{"\\udc00":"x"}'),
    ("texts", '{"a":"\\udc00"}'),
]
GETTERS = {
    "text": lambda fields: fields.text("x", 8),
    "hex": lambda fields: fields.hex("x", 2),
    "integer": lambda fields: fields.integer("x", 0, 10),
    "seconds": lambda fields: fields.seconds("x"),
    "texts": lambda fields: fields.texts("x", 2, 8),
}


@pytest.mark.parametrize(("getter", "value"), BAD_FIELDS)
def test_fields_of_wrong_type_or_out_of_bounds_are_format_errors(getter, value):
    fields = opened('"kind":"thing","format":1,"x":' + value + "}")
    with pytest.raises(FormatError, match=r"its field 'x' is .* expected") as caught:
        GETTERS[getter](fields)
    assert caught.value.context["key"] == "where/it/is"
    assert str(caught.value).isascii()


@pytest.mark.parametrize("getter", GETTERS)
def test_missing_fields_are_format_errors(getter):
    with pytest.raises(FormatError, match="its field 'x' is missing"):
        GETTERS[getter](opened('"kind":"thing","format":1}'))


def test_deep_and_hostile_values_are_not_printed():
    deep = opened('"kind":"thing","format":1,"x":' + "[" * 500 + "]" * 500 + ',"y":"\\u001b[2J' + "x" * 500 + '"}')
    with pytest.raises(FormatError, match="a list"):
        deep.integer("x", 0, 1)
    with pytest.raises(FormatError) as caught:
        deep.integer("y", 0, 1)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [True, 1.0, "1", 2])
def test_expect_compares_the_type_as_well(value):
    fields = opened('"kind":"thing","format":1,"x":1}')
    with pytest.raises(CorruptionError):
        fields.expect("x", value)


def test_not_even_a_finite_float_may_be_sealed_as_nan():
    with pytest.raises(ValueError, match="Out of range"):
        seal("thing", {"x": math.nan})


# ---- in storage


def test_read_bounded_asks_for_the_size_first_and_never_holds_more():
    async def main():
        backend = FaultBackend(memory())
        await backend.put("k", [b"x" * 100])
        await backend.put("empty", [])
        assert await read_bounded(backend, "k", 100) == b"x" * 100
        assert await read_bounded(backend, "k", 100, 100) == b"x" * 100
        assert await read_bounded(backend, "empty", 100) == b""
        backend.operations.clear()
        with pytest.raises(CorruptionError, match="100 bytes, at most 99"):
            await read_bounded(backend, "k", 99)
        assert [operation.verb for operation in backend.operations] == ["head"]
        with pytest.raises(CorruptionError):
            await read_bounded(backend, "k", 1000, 101)
        with pytest.raises(ObjectNotFoundError):
            await read_bounded(backend, "nothing", 1000)

    loop.run(main())


def test_read_sealed():
    async def main():
        backend = memory()
        await backend.put("k", [seal("thing", FIELDS)])
        assert (await read_sealed(backend, "k", kind="thing")).integer("number", 7, 7) == 7

    loop.run(main())


def test_put_once_returns_what_is_there():
    async def main():
        backend = memory()
        assert await put_once(backend, "k", b"first") == b"first"
        assert await put_once(backend, "k", b"second") == b"first"
        assert await backend.get("k") == b"first"

    loop.run(main())


@pytest.mark.parametrize(
    "error", [StorageError("connection reset", retryable=True), AlreadyExistsError("retried by the client")]
)
def test_a_put_whose_answer_was_lost_is_read_back(error):
    async def main():
        backend = FaultBackend(memory())
        rule = backend.lose_answer("put_if_absent", error)
        assert await put_once(backend, "k", b"mine") == b"mine"
        assert rule.num_hit == 1

    loop.run(main())


def test_a_put_that_failed_and_left_nothing_raises_its_own_error():
    async def main():
        backend = FaultBackend(memory())
        backend.fail("put_if_absent", AccessDeniedError("no"))
        with pytest.raises(AccessDeniedError, match="no"):
            await put_once(backend, "k", b"mine")
        backend.lose_answer("put_if_absent", StorageError("first"))
        backend.fail("head", StorageError("second"))
        with pytest.raises(StorageError, match="first"):
            await put_once(backend, "k", b"mine")

    loop.run(main())


def test_an_object_that_comes_and_goes():
    async def main():
        backend = FaultBackend(memory())
        backend.fail("put_if_absent", AlreadyExistsError("was there"))
        assert await put_once(backend, "k", b"mine") == b"mine"
        backend.fail("head", ObjectNotFoundError("gone again"), times=100)
        with pytest.raises(ConflictError):
            await put_once(backend, "k", b"mine")

    loop.run(main())
