"""FORMAT.md against the code: its tables, its limits and the bytes of its worked example."""

from __future__ import annotations

import importlib
import json
import re
import struct
from pathlib import Path

import pytest

from vescale_storage import fragment, keys, pack, sealed
from vescale_storage.codec import Codec, decode_chunk
from vescale_storage.digest import digest
from vescale_storage.fragment import AbortRecord, decode_abort, decode_fragment, encode_abort, encode_fragment
from vescale_storage.refs import Ref, Tag, decode_ref, decode_tag, encode_ref, encode_tag
from vescale_storage.root import STORE_VERSION, Root, encode_root

DOCUMENT = (Path(__file__).parents[2] / "storage" / "FORMAT.md").read_text(encoding="utf-8")

TXN = "000102030405060708090a0b0c0d0e0f"
REF = Ref("my run", 1200, 1, "f9e0897d707b79c7a146981418d6485136195b5c7fa702dcf05fba24c1899d14", TXN, 1767225600.5)
TAG = Tag("best", REF, 1767225601.0)
ROOT = Root("101112131415161718191a1b1c1d1e1f", (1, 0), "blake3-256", 1767225600.0)
ABORT = AbortRecord(TXN, 3, "no_space", "disk full")


def after(marker: str) -> list[str]:
    """Return the lines that follow a marker, up to the next empty line."""
    found = DOCUMENT.split(f"<!-- {marker} -->\n")
    assert len(found) == 2, f"the marker {marker!r} stands {len(found) - 1} times in FORMAT.md"
    return found[1].split("\n\n")[0].splitlines()


def table(marker: str) -> list[list[str]]:
    """Return the cells of a table without its head."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in after(marker)]
    assert set(rows[1][0]) == {"-"}
    return rows[2:]


def example(name: str) -> bytes:
    """Return the bytes of an example: a hex dump, or a line of text."""
    first, *lines, last = after(f"example: {name}")
    assert (first, last) == ("```", "```")
    if not re.match(r"0{8}  ", lines[0]):
        assert len(lines) == 1
        return lines[0].encode("ascii")
    data = bytearray()
    for line in lines:
        offset, rest = line[:8], line[10:57]
        assert int(offset, 16) == len(data)
        data += bytes.fromhex(rest)
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in data[int(offset, 16) :])
        assert line[57:] == f"  |{shown}|"
    return bytes(data)


def struct_of(marker: str) -> str:
    """Return the struct format of a table of offset, size, type and field."""
    formats, end = "<", 0
    for offset, size, kind, _ in table(marker):
        assert int(offset) == end
        end += int(size)
        formats += f"{size}s" if kind == "bytes" else {"1": "B", "2": "H", "4": "I", "8": "Q"}[size]
    assert struct.calcsize(formats) == end
    return formats


@pytest.mark.parametrize(
    ("marker", "code"),
    [
        ("struct: pack entry", pack._ENTRY),
        ("struct: pack trailer", pack._TRAILER),
        ("struct: fragment header", fragment._HEADER),
    ],
)
def test_byte_tables(marker, code):
    assert struct_of(marker) == code.format


def test_sizes_versions_and_magics_in_the_text():
    assert f"Entry, {pack.ENTRY_BYTES} bytes" in DOCUMENT
    assert f"Trailer, {pack.FOOTER_TRAILER_BYTES} bytes" in DOCUMENT
    for marker, magic, version in (
        ("struct: pack trailer", pack.PACK_MAGIC, pack.PACK_VERSION),
        ("struct: fragment header", fragment.FRAGMENT_MAGIC, fragment.FRAGMENT_VERSION),
    ):
        fields = [row[3] for row in table(marker)]
        assert f"magic: `{magic.hex(' ')}`" in fields
        assert f"version: {version}" in fields
        assert "flags: 0" in fields
    assert f"# The store's format, version {STORE_VERSION[0]}\n" in DOCUMENT
    assert f"Version {STORE_VERSION[0]}.{STORE_VERSION[1]}" in DOCUMENT


def test_codecs():
    assert [(int(value), name) for value, name, _ in table("codecs")] == [(int(codec), codec.name) for codec in Codec]


def test_limits_are_those_of_the_code_and_none_is_missing():
    documented = {name.strip("`"): int(value) for name, value in table("limits")}
    for name, value in documented.items():
        module, constant = name.split(".")
        assert getattr(importlib.import_module(f"vescale_storage.{module}"), constant) == value
    for module in (keys, sealed, fragment, pack):
        for constant in vars(module):
            if re.fullmatch(r"MAX_\w+", constant) and constant != "MAX_SECONDS":
                owner = module.__name__.rpartition(".")[2]
                assert any(name.endswith(f".{constant}") for name in documented), f"{owner}.{constant}"


def test_keys():
    made = {
        "root": keys.STORE_KEY,
        "pack": keys.pack_key(EXAMPLE_PACK_NAME),
        "manifest": keys.manifest_key(REF.manifest),
        "ref": REF.key,
        "tag": TAG.key,
        "fragment": keys.fragment_key(TXN, 3),
        "abort record": keys.abort_key(TXN, 3),
        "index": keys.index_key(REF.manifest),
        "mark of a collection": "",
    }
    rows = table("keys")
    assert {row[0]: row[2].strip("`") if len(row) > 2 else "" for row in rows} == made
    for name, pattern, *_ in rows:
        fixed = pattern.strip("`").split("<")[0].removesuffix("...")
        assert made[name].startswith(fixed) or name == "mark of a collection"


TYPES = {"string": str, "integer": int, "number": float, "object": dict}


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("store", encode_root(ROOT)),
        ("ref", encode_ref(REF)),
        ("tag", encode_tag(TAG)),
        ("abort", encode_abort(ABORT)),
    ],
)
def test_fields_of_records(kind, data):
    written = json.loads(data)
    rows = table("record: common") + (table("record: ref") if kind == "tag" else []) + table(f"record: {kind}")
    assert [row[0].strip("`") for row in rows] == list(written)
    for name, type_, _ in rows:
        value = written[name.strip("`")]
        if type_.endswith(" hex"):
            assert re.fullmatch(f"[0-9a-f]{{{type_.split()[0]}}}", value)
        else:
            assert type(value) is TYPES[type_]


EXAMPLE_PACK_NAME = digest(example("pack")[-110:]).hex()


def test_the_example_pack_is_read_and_written_by_the_code():
    data = example("pack")
    footer = data[-110:]
    entries = pack.decode_footer(footer, object_size_bytes=len(data), name=EXAMPLE_PACK_NAME)
    raw = [struct.pack("<4i", 0, 1, 2, 3), bytes(256)]
    stored = [data[entry.offset : entry.offset + entry.length] for entry in entries]
    assert [decode_chunk(s, e.codec, len(r)) for s, e, r in zip(stored, entries, raw, strict=True)] == raw
    assert [entry.digest for entry in entries] == [digest(chunk) for chunk in raw]
    builder = pack.PackBuilder()
    for chunk, part, codec in zip(raw, stored, (Codec.RAW, Codec.ZSTD), strict=True):
        builder.add(digest(chunk), [part], codec)
    made = builder.finish()
    assert b"".join(bytes(part) for part in made.payload) == data
    assert made.name_hex == EXAMPLE_PACK_NAME
    assert stored[1][0] == 4
    for text in (f"`10`-`{0x10 + len(stored[1]) - 1:x}`", "`24`", "`51`", "`7e`", "110 (`6e`) bytes"):
        assert text in DOCUMENT
    assert data.index(entries[0].digest) == 0x24
    assert data.index(entries[1].digest) == 0x51
    assert data.index(struct.pack("<II", 2, 110)) == 0x7E


def test_the_example_records_are_read_and_written_by_the_code():
    for name, made in (
        ("ref", encode_ref(REF)),
        ("tag", encode_tag(TAG)),
        ("store", encode_root(ROOT)),
        ("abort", encode_abort(ABORT)),
    ):
        assert example(name) == made
    assert decode_ref(example("ref"), REF.key) == REF
    assert decode_tag(example("tag"), TAG.key) == TAG
    assert decode_abort(example("abort"), TXN, 3) == ABORT


def test_the_example_fragment_is_read_and_written_by_the_code():
    data = example("fragment")
    assert b"".join(bytes(part) for part in encode_fragment(TXN, 3, b"content")) == data
    assert decode_fragment(data, TXN, 3) == b"content"


def test_the_seal_as_the_document_describes_it():
    data = example("ref")
    assert data[:10] == b'{"check":"'
    assert data[10:74].decode() == digest(data[74:]).hex()
    assert data[74:76] == b'",'
