from __future__ import annotations

import dataclasses
import json

import pytest

from vescale_storage.errors import ConfigError, CorruptionError, FormatError
from vescale_storage.ref_records import (
    Ref,
    SnapshotName,
    Tag,
    decode_ref,
    decode_tag,
    encode_ref,
    encode_tag,
    parse_name,
)
from vescale_storage.sealed import seal

REF = Ref("my run", 1200, 3, "ab" * 32, "cd" * 16, 1700000000.25)
TAG = Tag("best ☃", REF, 1700000001.5)


def test_a_ref_comes_back_from_readable_json():
    data = encode_ref(REF)
    assert decode_ref(data, REF.key) == REF
    assert REF.key == "refs/my%20run/000000001200.000003"
    assert json.loads(data) == {
        "check": data[10:74].decode(),
        "kind": "ref",
        "format": 1,
        "run": "my run",
        "step": 1200,
        "version": 3,
        "manifest": "ab" * 32,
        "transaction": "cd" * 16,
        "created": 1700000000.25,
    }


def test_a_tag_says_all_that_its_ref_says():
    data = encode_tag(TAG)
    assert decode_tag(data, TAG.key) == TAG
    assert TAG.key == "refs/my%20run/tags/best%20%E2%98%83"
    assert json.loads(data) == {
        **json.loads(encode_ref(REF)),
        "check": data[10:74].decode(),
        "kind": "tag",
        "tag": "best ☃",
        "tagged": 1700000001.5,
    }


@pytest.mark.parametrize(
    ("data", "key", "decode"), [(encode_ref(REF), REF.key, decode_ref), (encode_tag(TAG), TAG.key, decode_tag)]
)
def test_every_flipped_byte_every_cut_and_every_addition_is_corruption_that_names_the_key(data, key, decode):
    damaged = [
        data[:i] + bytes([data[i] ^ bits]) + data[i + 1 :] for i in range(len(data)) for bits in (1, 32, 128, 255)
    ]
    damaged += [data[:i] for i in range(len(data))] + [data[i:] for i in range(1, len(data))]
    damaged += [data + b"\x00", data + b"\n", data + b"}", b" " + data, data + data]
    for bad in damaged:
        with pytest.raises(CorruptionError) as caught:
            decode(bad, key)
        assert key in str(caught.value)
        assert caught.value.context["key"] == key


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(REF, run="other"),
        dataclasses.replace(REF, step=1201),
        dataclasses.replace(REF, version=4),
    ],
)
def test_a_whole_ref_under_another_key_is_corruption(other):
    with pytest.raises(CorruptionError):
        decode_ref(encode_ref(REF), other.key)


def test_a_whole_tag_under_another_key_is_corruption():
    for other in (Tag("best", REF, 1.0), Tag(TAG.name, dataclasses.replace(REF, run="other"), 1.0)):
        with pytest.raises(CorruptionError):
            decode_tag(encode_tag(TAG), other.key)
    with pytest.raises(CorruptionError):
        decode_ref(encode_tag(TAG), REF.key)


@pytest.mark.parametrize(
    "change",
    [
        {"manifest": "ab" * 31},
        {"manifest": "AB" * 32},
        {"manifest": 5},
        {"transaction": "cd" * 32},
        {"transaction": None},
        {"created": -1},
        {"created": "now"},
        {"created": True},
    ],
)
def test_sealed_fields_of_wrong_type_are_format_errors(change):
    fields = {
        key: value for key, value in json.loads(encode_ref(REF)).items() if key not in {"check", "kind", "format"}
    }
    assert decode_ref(seal("ref", fields), REF.key) == REF
    assert decode_ref(seal("ref", {**fields, "later": [1, {"a": None}]}), REF.key) == REF
    with pytest.raises(FormatError):
        decode_ref(seal("ref", {**fields, **change}), REF.key)
    for name in change:
        with pytest.raises(FormatError, match="missing"):
            decode_ref(seal("ref", {key: value for key, value in fields.items() if key != name}), REF.key)


@pytest.mark.parametrize(
    "change", [{"run": "old"}, {"step": "1200"}, {"step": 1200.0}, {"version": True}, {"run": None}]
)
def test_fields_that_contradict_the_key_are_corruption(change):
    fields = {
        key: value for key, value in json.loads(encode_ref(REF)).items() if key not in {"check", "kind", "format"}
    }
    with pytest.raises(CorruptionError):
        decode_ref(seal("ref", {**fields, **change}), REF.key)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "a/b"},
        {"step": -1},
        {"version": 0},
        {"manifest": "x"},
        {"transaction": "x"},
        {"created_seconds": -1.0},
        {"created_seconds": float("nan")},
        {"created_seconds": float("inf")},
    ],
)
def test_what_no_reader_would_accept_is_not_written(change):
    ref = dataclasses.replace(REF, **change)
    with pytest.raises(ConfigError):
        encode_ref(ref)
    with pytest.raises(ConfigError):
        encode_tag(Tag("t", ref, 1.0))


def test_tags_that_no_reader_would_accept_are_not_written():
    for tag in (Tag("12", REF, 1.0), Tag("a/b", REF, 1.0), Tag("t", REF, -1.0)):
        with pytest.raises(ConfigError):
            encode_tag(tag)


def test_names_that_people_type():
    assert parse_name("llama-7b") == SnapshotName("llama-7b")
    assert parse_name("llama-7b@1000") == SnapshotName("llama-7b", step=1000)
    assert parse_name("llama-7b@007") == SnapshotName("llama-7b", step=7)
    assert parse_name("llama-7b@000") == SnapshotName("llama-7b", step=0)
    assert parse_name("llama 7b@best one") == SnapshotName("llama 7b", tag="best one")
    assert parse_name("5@1e3") == SnapshotName("5", tag="1e3")


@pytest.mark.parametrize(
    "text", ["", "@", "@5", "run@", "a@b@c", "a/b@5", "run@" + "9" * 13, "run@" + "9" * 10_000, "run@.."]
)
def test_names_that_mean_nothing(text):
    with pytest.raises(ConfigError):
        parse_name(text)
