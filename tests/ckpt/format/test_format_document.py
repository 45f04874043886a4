"""The sections of FORMAT.md on documents, manifests, trees and fragments, against the code."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from vescale_ckpt.format import checks, document, fragment, manifest, tensor_table, tree_codec
from vescale_ckpt.format.document import Document, decode_document
from vescale_ckpt.format.fragment import Fragment, encode_fragment
from vescale_ckpt.format.kinds import FragmentKind, Kind
from vescale_ckpt.format.manifest import decode_manifest, encode_manifest
from vescale_ckpt.format.records import FORMAT_VERSION, Manifest
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.state.dtypes import DTYPE_NAMES, item_bytes
from vescale_ckpt.state.leaf import LeafKind
from vescale_ckpt.state.tree import MAX_DEPTH

TEXT = (Path(__file__).parents[3] / "storage" / "FORMAT.md").read_text(encoding="utf-8")


def table(marker):
    """Return the cells of the table after a marker, without its head."""
    found = TEXT.split(f"<!-- {marker} -->\n")
    assert len(found) == 2, marker
    rows = [
        [cell.strip() for cell in re.split(r" \| ", line.strip().strip("|"))]
        for line in found[1].split("\n\n")[0].splitlines()
    ]
    return rows[2:]


def words():
    """Return the text as one line, as a sentence may be broken anywhere."""
    return " ".join(TEXT.split())


@pytest.mark.parametrize(
    ("marker", "code"), [("struct: document header", document.HEADER), ("struct: document entry", document.ENTRY)]
)
def test_byte_tables(marker, code):
    formats, end = "<", 0
    for offset, size, kind, _ in table(marker):
        assert int(offset) == end
        end += int(size)
        formats += f"{size}s" if kind == "bytes" else {"2": "H", "4": "I", "8": "Q"}[size]
    assert formats == code.format
    assert end == code.size


def test_magics_versions_and_bounds_in_the_text():
    fields = [row[3] for row in table("struct: document header")]
    assert f"magic: `{manifest.MAGIC.hex(' ')}` of a manifest, `{fragment.MAGIC.hex(' ')}` of a fragment" in fields
    assert f"major version: {FORMAT_VERSION[0]}" in fields
    assert f"minor version: {FORMAT_VERSION[1]}" in fields
    assert f"number of sections, at most {document.MAX_SECTIONS}" in fields
    text = words()
    assert f"Header, {document.HEADER.size} bytes" in text
    assert f"one entry of {document.ENTRY.size} bytes" in text
    assert f"to a multiple of {document.ALIGNMENT}," in text
    assert f"A path has at most {MAX_DEPTH} keys." in text
    assert f"number of dims, at most {checks.MAX_NDIM} |" in TEXT
    assert checks.MAX_ELEMENTS == 2**62
    assert "fewer than 2^62 elements" in text
    assert checks.MAX_TILES == 2**32
    assert "at most 2^32 tiles" in text
    assert tensor_table.NO_ALIAS == 2**32 - 1
    assert tree_codec.MAX_RANK == 2**31 - 1


WIDTHS = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "32 bytes": 32}


def items_of(manifest_):
    """Return how many items each column of the manifest must have."""
    num, chunks = len(manifest_.tensors), manifest_.chunks
    dims = sum(len(tensor.shape) for tensor in manifest_.tensors)
    counts = {kind: num for kind in Kind if kind.name.startswith("TENSOR_")}
    counts |= {Kind.TENSOR_SHAPE: dims, Kind.TENSOR_TILE: dims}
    counts |= {kind: len(chunks) for kind in Kind if kind.name.startswith("CHUNK_")} | {Kind.CHUNK_FIRST: num + 1}
    counts |= {Kind.PARTIAL_ROW: len(chunks.partial_row), Kind.PARTIAL_BOX: len(chunks.partial_box)}
    return counts | {Kind.PACK_NAME: len(manifest_.packs), Kind.PACK_SIZE: len(manifest_.packs)}


def sections_of(data, magic, kinds):
    return decode_document(data, magic=magic, version=FORMAT_VERSION, what="x", known=frozenset(kinds)).sections


def test_sections_of_a_manifest(manifest):
    rows = table("sections: manifest")
    assert [(int(kind), name) for kind, name, *_ in rows] == [(kind.value, kind.name) for kind in Kind]
    sections = sections_of(encode_manifest(manifest), b"\x89VSMAN\r\n", Kind)
    counts = items_of(manifest)
    for kind, _, content, _ in rows:
        if content == "JSON":
            json.loads(bytes(sections[int(kind)]))
        else:
            assert len(sections[int(kind)]) == WIDTHS[content] * counts[Kind(int(kind))]


def test_sections_of_a_fragment(manifest):
    rows = table("sections: fragment")
    assert [(int(kind), name) for kind, name, *_ in rows] == [(kind.value, kind.name) for kind in FragmentKind]
    chunks = fragment.FragmentChunks.of(
        tensor=[1, 2, 3],
        tile=[0, 0, 0],
        digest=[b"x" * 32] * 3,
        pack=[0, 0, 0],
        offset=[0, 0, 0],
        length=[1, 1, 1],
        codec=[0, 0, 0],
        partial=[(0, Box((1, 2), (1, 2)))],
    ).with_shares([(0, Box((1, 3), (1, 1)))])
    full = Fragment(
        rank=0, plan_key=b"", tree=manifest.tree, chunks=chunks, packs=manifest.packs, replicas={1: b"x" * 32}
    )
    sections = sections_of(encode_fragment(full), b"\x89VSFRG\r\n", FragmentKind)
    counts = {"CHUNK": 3, "PARTIAL": 1, "PACK": 2, "REPLICA": 1, "PARTIAL_BOX": 4, "SHARE": 1, "SHARE_BOX": 4}
    for kind, name, content, _ in rows:
        if content != "JSON":
            count = counts.get(name) or counts[name.split("_")[0]]
            assert len(sections[int(kind)]) == WIDTHS[content] * count


TYPES = {"string": str, "integer": int, "number": float, "object": dict}


@pytest.mark.parametrize(
    ("marker", "kind"), [("manifest head", Kind.HEAD), ("manifest tensors", Kind.TENSORS), ("fragment head", None)]
)
def test_fields(manifest, marker, kind):
    if kind is None:
        data = sections_of(encode_fragment(Fragment(rank=0, plan_key=b"k")), fragment.MAGIC, FragmentKind)[1]
    else:
        data = sections_of(encode_manifest(manifest), b"\x89VSMAN\r\n", Kind)[kind]
    written = json.loads(bytes(data))
    rows = table(f"record: {marker}")
    assert [row[0].strip("`") for row in rows] == list(written)
    for name, type_, _ in rows:
        value = written[name.strip("`")]
        if type_.endswith(" hex"):
            assert re.fullmatch(f"[0-9a-f]{{{type_.split()[0]}}}", value)
        else:
            assert type(value) is TYPES.get(type_, list)


def test_a_chunk_takes_what_the_text_says(manifest):
    assert "A chunk that is a whole tile takes 53 bytes; a part of a tile 8 more, and 16 more for each dim." in words()
    widths = {int(kind): WIDTHS.get(content) for kind, _, content, _ in table("sections: manifest")}
    assert sum(widths[kind] for kind in range(33, 39)) == 53
    assert widths[39] == 8
    assert widths[40] * 2 == 16


def test_dtypes_and_the_sizes_of_their_items():
    documented = {name: int(size) for names, size in table("dtypes") for name in re.findall(r"`(\w+)`", names)}
    assert documented == {name: item_bytes(name) for name in DTYPE_NAMES}


def test_kinds():
    sentence = TEXT.split("**Kinds**")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) - {"uint8"} == {kind.value for kind in LeafKind}


def test_the_examples_of_nodes_are_canonical_and_every_form_has_one():
    examples = [re.findall(r"`(.*?)`", row[2])[0] for row in table("tree")]
    for text in examples:
        tree = tree_codec.decode_tree(text.encode())
        assert tree_codec.encode_tree(tree).decode() == text
    tags = {json.loads(text)[0] for text in examples if text.startswith("[")}
    assert tags == set(tree_codec._READERS) | {"tensor", "torch.dtype"}
    for marks in tree_codec._SPECIALS:
        assert f"`{json.dumps(marks, separators=(',', ':'))}`" in TEXT


def test_the_example_manifest():
    lines = TEXT.split("<!-- example: manifest -->\n```\n")[1].split("\n```")[0].splitlines()
    data = b"".join(bytes.fromhex(line[10:57]) for line in lines)
    assert [int(line[:8], 16) for line in lines] == list(range(0, len(data), 16))
    back = decode_manifest(data)
    assert encode_manifest(back) == data
    assert (back.run, back.step, back.tensors, len(back.chunks)) == ("r", 0, (), 0)
    text = words()
    assert f"has {len(data)} bytes" in text
    num_sections = struct.unpack_from("<I", data, 12)[0]
    end = document.HEADER.size + num_sections * document.ENTRY.size
    offsets = {
        kind: struct.unpack_from("<Q", data, document.HEADER.size + document.ENTRY.size * i + 8)[0]
        for i, kind in enumerate(Kind)
    }
    assert f"The header ends at `{document.HEADER.size:x}`, the table of {num_sections} sections at `{end:x}`" in text
    assert (
        f"HEAD begins at `{offsets[Kind.HEAD]:x}`, TREE at `{offsets[Kind.TREE]:x}`, TENSORS at "
        f"`{offsets[Kind.TENSORS]:x}`; CHUNK_FIRST, one 0, is at `{offsets[Kind.CHUNK_FIRST]:x}`" in text
    )


def test_every_field_of_the_records_is_stored():
    derived = {"chunks", "packs", "tensors", "tree", "version", "_by_path", "_by_fqn"}
    stored = {row[0].strip("`") for row in table("record: manifest head")}
    assert {column.name for column in dataclasses.fields(Manifest)} - derived == stored


def test_columns_are_little_endian_whatever_the_machine():
    column = Document("x", (1, 0), {1: memoryview(b"\1\0\0\0")}).column(1, np.uint32)
    assert column.tolist() == [1]
