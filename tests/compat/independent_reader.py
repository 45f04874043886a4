"""A second reader of stores, made from ``storage/FORMAT.md`` alone: it shares no code with the packages.

It is small rather than fast, reads local folders, and believes nothing that it has not checked. Names and the order of
checks are the document's, so that the two can be read side by side.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import unicodedata
from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from blake3 import blake3

Keys = tuple[str | int, ...]
Box = tuple[slice, ...]

SECTION_TABLE = """
1 HEAD json, 2 TREE json, 3 TENSORS json, 16 TENSOR_DTYPE <u2, 17 TENSOR_KIND <u2, 18 TENSOR_NDIM u1,
19 TENSOR_SHAPE <u8, 20 TENSOR_TILE <u8, 21 TENSOR_ALIAS <u4, 32 CHUNK_FIRST <u8, 33 CHUNK_TILE <u4,
34 CHUNK_DIGEST V32, 35 CHUNK_PACK <u4, 36 CHUNK_OFFSET <u8, 37 CHUNK_LENGTH <u4, 38 CHUNK_CODEC u1,
39 PARTIAL_ROW <u8, 40 PARTIAL_BOX <u8, 48 PACK_NAME V32, 49 PACK_SIZE <u8
"""
SECTIONS = {int(kind): (name, content) for kind, name, content in map(str.split, SECTION_TABLE.split(","))}
PACK_ENTRY = np.dtype([("digest", "V32"), ("offset", "<u8"), ("length", "<u4"), ("codec", "u1")])
DTYPES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
    2: "uint16 int16 float16 bfloat16",
    4: "uint32 int32 float32 complex32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
ITEM_SIZES = {dtype: size for size, dtypes in DTYPES.items() for dtype in dtypes.split()}
RECORDS = {
    "store": {"id": str, "major": int, "minor": int, "hash": str, "created": float},
    "ref": {"run": str, "step": int, "version": int, "manifest": str, "transaction": str, "created": float},
}
RECORDS["tag"] = RECORDS["ref"] | {"tag": str, "tagged": float}
HEAD = {"run": str, "step": int, "created_seconds": float, "transaction": str, "world_size": int}
HEAD |= {"writer": str, "metadata": dict}


class DamagedError(Exception):
    """Something is missing, or not as the format says."""


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor in a tree."""

    path: Keys


@dataclass(frozen=True)
class PerRank:
    """A value that every rank had for itself."""

    values: dict[int, Any]


@dataclass(frozen=True)
class Library:
    """A value of a library, kept as it is written."""

    type: str
    text: str


def require(condition: object, what: str) -> None:
    """Raise DamagedError if ``condition`` does not hold."""
    if not condition:
        raise DamagedError(what)


# Records and names


def parse_json(data: bytes) -> Any:
    """Return strict JSON: no name twice in an object, only finite numbers of modest length, only valid Unicode."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(dict(items)) == len(items), "a name comes twice in a JSON object")
        return dict(items)

    def number(digits: str) -> float:
        require(math.isfinite(float(digits)), "a number in JSON is not finite")
        return float(digits)

    def integer(digits: str) -> int:
        require(len(digits.lstrip("-")) <= 20, "a huge integer in JSON")
        return int(digits)

    hooks = {"object_pairs_hook": pairs, "parse_float": number, "parse_constant": number, "parse_int": integer}
    try:
        value = json.loads(data.decode("utf-8"), **hooks)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails for lone surrogates
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"not JSON: {error}") from error
    return value


def require_fields(record: Any, fields: dict[str, type], what: str) -> None:
    """Require that a JSON object has these fields, each of its type; integers are numbers, too."""
    require(isinstance(record, dict), f"{what} is no object")
    for name, kind in fields.items():
        right = type(record.get(name)) in ({int, float} if kind is float else {kind})
        require(right, f"{what}: {name} is {record.get(name)!r}")


def unseal(data: bytes, kind: str) -> dict[str, Any]:
    """Return the fields of a sealed record of one kind."""
    require(len(data) <= 65536 and data.isascii(), f"the {kind} is too long or not ASCII")
    require(data[:10] == b'{"check":"' and data[74:76] == b'",', f"the {kind} is no sealed record")
    require(data[10:74] == blake3(data[74:]).hexdigest().encode(), f"the {kind} is damaged")
    record = parse_json(data)
    require_fields(record, {"kind": str, "format": int}, kind)
    require(record["kind"] == kind, f"a {record['kind']}, not a {kind}")
    require(record["format"] == 1, f"a {kind} of format {record['format']}; known is 1")
    require_fields(record, RECORDS[kind], kind)
    return record


def escape(name: str) -> str:
    """Return the name of a run or tag as it stands in keys."""
    wrong = any(char in "/@" or unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"} for char in name)
    require(name not in {"", ".", ".."} and not wrong, f"{name!r} is no name")
    escaped = "".join(chr(b) if re.match(rb"[A-Za-z0-9._-]", bytes([b])) else f"%{b:02X}" for b in name.encode())
    require(len(escaped) <= 200, f"{name!r} is too long")
    return escaped


def unescape(escaped: str) -> str | None:
    """Return the name that a part of a key spells, or None if it is not the one spelling of a name."""
    try:
        name = re.sub(rb"%(..)", lambda found: bytes([int(found[1], 16)]), escaped.encode()).decode()
        return name if escape(name) == escaped else None
    except (ValueError, DamagedError):
        return None


# Manifests


def decode_document(data: bytes) -> dict[str, Any]:
    """Return the sections of a manifest by name: JSON values, and columns as lists of integers or digests."""
    require(len(data) >= 24, "the document is too short")
    magic, major, _, count, size = struct.unpack_from("<8sHHIQ", data)
    require(magic == b"\x89VSMAN\r\n", "not a manifest")
    require(major == 1, f"a manifest of version {major}; known is 1")
    require(count <= 1024 and size == len(data) >= 24 + 24 * count, "the document has another size")
    found, last, end = {}, -1, 24 + 24 * count
    for start in range(24, end, 24):
        kind, flags, zero, offset, length = struct.unpack_from("<HHIQQ", data, start)
        require(kind > last and zero == 0, "the table of sections is damaged")
        require(offset == end and length <= size - end, "the sections do not follow one another")
        last, end = kind, end + length + -length % 8
        require(end <= size and not any(data[offset + length : end]), "the padding is not zero")
        require(kind in SECTIONS or flags & 1 == 0, f"section {kind} is of a newer version")
        found[kind] = data[offset : offset + length]
    require(end == size and SECTIONS.keys() <= found.keys(), "sections are missing, or more follows them")
    return {name: _decode_section(content, found[kind]) for kind, (name, content) in SECTIONS.items()}


def _decode_section(content: str, data: bytes) -> Any:
    if content == "json":
        return parse_json(data)
    require(len(data) % np.dtype(content).itemsize == 0, "a column is no whole number of items")
    return np.frombuffer(data, content).tolist()


def _write_str(value: str) -> str:
    lone = any("\ud800" <= char <= "\udfff" for char in value)
    return value.encode("utf-8", "surrogatepass").hex() if lone else "valid"


SCALARS = {
    "str": (lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"), _write_str),
    "int": (lambda text: int(text, 16), lambda value: f"{value:x}" if abs(value) >= 2**53 else "small"),
    "float": (lambda text: struct.unpack(">d", bytes.fromhex(text))[0], lambda value: struct.pack(">d", value).hex()),
    "complex": (
        lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
        lambda value: struct.pack(">dd", value.real, value.imag).hex(),
    ),
    "bytes": (lambda text: base64.b64decode(text, validate=True), lambda value: base64.b64encode(value).decode()),
}
"""By node: how its text is read and how it is written; a value has one form only, so they must agree."""
LIBRARY = re.compile(r"[a-z][a-z0-9_]{0,31}(\.[A-Za-z0-9_]{1,32}){1,3}")
CONTAINERS = {"list": list, "tuple": tuple, "per_rank": PerRank}
DICTS = [([], dict), (["ordered"], OrderedDict), (["counter"], Counter)]
DICTS += [([*marks, "union"], make) for marks, make in DICTS]


def decode_tree(node: Any, path: Keys, tensors: list[Keys]) -> Any:
    """Return the value of a node; the paths of all tensors below it are added to ``tensors``."""
    if node is None or isinstance(node, bool | str) or (isinstance(node, int) and abs(node) < 2**53):
        return node
    require(isinstance(node, list) and node and isinstance(node[0], str), f"{node!r} is no node")
    kind, *items = node
    if kind == "tensor" and not items:
        tensors.append(path)
        return Tensor(path)
    if kind == "dict" or kind in CONTAINERS:
        return _decode_container(kind, items, path, tensors)
    known = kind in SCALARS or LIBRARY.fullmatch(kind)
    require(known and len(items) == 1 and isinstance(items[0], str), f"{node!r} is no node")
    if kind not in SCALARS:
        return Library(kind, items[0])
    read, write = SCALARS[kind]
    try:
        value = read(items[0])
    except (ValueError, struct.error) as error:
        raise DamagedError(f"{node!r}: {error}") from error
    require(write(value) == items[0], f"{node!r} is not the form of its value")
    return value


def _decode_container(kind: str, items: list[Any], path: Keys, tensors: list[Keys]) -> Any:
    require(len(path) < 64, "a container at a path of 64 keys")
    if kind in {"list", "tuple"}:
        items.insert(0, list(range(len(items[0]))) if items and isinstance(items[0], list) else None)
    marks = items.pop() if kind == "dict" and len(items) == 3 and items[2] else []
    make = CONTAINERS.get(kind) or next((made for form, made in DICTS if form == marks), None)
    require(len(items) == 2 and all(isinstance(item, list) for item in items) and make, f"a damaged {kind}")
    keys, nodes = items
    require(all(type(k) is str or (type(k) is int and -(2**63) <= k < 2**63) for k in keys), "not a key")
    require(len(set(keys)) == len(keys) == len(nodes), "keys and values differ, or a key comes twice")
    values = {key: decode_tree(node, (*path, key), tensors) for key, node in zip(keys, nodes, strict=True)}
    if kind == "per_rank":
        require(all(isinstance(rank, int) and 0 <= rank < 2**31 for rank in keys), "a rank is none")
        require(keys == sorted(keys), "the ranks do not ascend")
    return make(values.values()) if kind in {"list", "tuple"} else make(values)


class Snapshot:
    """One checkpoint: ``head`` and ``tree`` are plain values, and tensors are read by their paths."""

    def __init__(self, store: Store, manifest: bytes) -> None:
        self.store, self.tables = store, decode_document(manifest)
        self.head = self.tables["HEAD"]
        require_fields(self.head, HEAD, "the head")
        places: list[Keys] = []
        self.tree = decode_tree(self.tables["TREE"], (), places)
        self._check_tensors(places)
        self._check_storage()
        self._check_chunks()

    def _check_tensors(self, places: list[Keys]) -> None:
        """Check the tables of tensors, and lay them out by tensor."""
        tables, names = self.tables, self.tables["TENSORS"]
        require_fields(names, {"dtypes": list, "kinds": list, "paths": list}, "the names of tensors")
        require(all(isinstance(name, str) for name in names["dtypes"] + names["kinds"]), "a name is none")
        right = (isinstance(path, list) and all(type(key) in {str, int} for key in path) for path in names["paths"])
        require(all(right), "a path is none")
        self.paths: list[Keys] = [tuple(path) for path in names["paths"]]
        self.index = {path: index for index, path in enumerate(self.paths)}
        require(len(self.index) == len(self.paths) and self.index.keys() == set(places), "paths and tree differ")
        bounds = {"DTYPE": len(names["dtypes"]), "KIND": len(names["kinds"]), "NDIM": 65, "ALIAS": 2**32}
        for name, bound in bounds.items():
            column = tables[f"TENSOR_{name}"]
            require(len(column) == len(self.paths) and max(column, default=-1) < bound, f"TENSOR_{name} is damaged")
        ends = np.cumsum([0, *tables["TENSOR_NDIM"]]).tolist()
        require(len(tables["TENSOR_SHAPE"]) == len(tables["TENSOR_TILE"]) == ends[-1], "dims are missing")
        self.shapes = [tuple(tables["TENSOR_SHAPE"][start:end]) for start, end in pairwise(ends)]
        self.tiles = [tuple(tables["TENSOR_TILE"][start:end]) for start, end in pairwise(ends)]
        for shape, tile in zip(self.shapes, self.tiles, strict=True):
            right = (1 <= t <= max(1, n) < 2**63 for n, t in zip(shape, tile, strict=True))
            require(all(right), f"{tile} is no tile of {shape}")
            require(math.prod(shape) < 2**62 and math.prod(_grid(shape, tile)) <= 2**32, f"{shape} is too large")
        self.dtypes = [names["dtypes"][place] for place in tables["TENSOR_DTYPE"]]
        self.kinds = [names["kinds"][place] for place in tables["TENSOR_KIND"]]
        self.owners = [i if alias == 2**32 - 1 else alias for i, alias in enumerate(tables["TENSOR_ALIAS"])]
        for i, owner in enumerate(self.owners):
            require(owner <= i and self.owners[owner] == owner, f"{self.paths[i]} is an alias of an alias")
            same = self.shapes[i] == self.shapes[owner] and self.dtypes[i] == self.dtypes[owner]
            require(same, f"{self.paths[i]} is an alias of another tensor")

    def _check_storage(self) -> None:
        """Check where the chunks lie."""
        tables, sizes = self.tables, self.tables["PACK_SIZE"]
        packs = tables["PACK_NAME"]
        require(len(set(packs)) == len(packs) == len(sizes), "the tables of packs are damaged")
        columns = [tables[f"CHUNK_{name}"] for name in ("TILE", "DIGEST", "PACK", "OFFSET", "LENGTH", "CODEC")]
        require(len({len(column) for column in columns}) == 1, "the tables of chunks differ")
        for _, _, pack, offset, length, codec in zip(*columns, strict=True):
            inside = pack < len(sizes) and offset + length <= sizes[pack] < 2**63
            require(inside and length > 0 and codec <= 1, "a chunk outside its pack, or of an unknown codec")

    def _check_chunks(self) -> None:
        """Check the chunks of each tensor, and find the box of each."""
        first, tiles, partial = (self.tables[name] for name in ("CHUNK_FIRST", "CHUNK_TILE", "PARTIAL_ROW"))
        require(len(first) == len(self.paths) + 1 and first == sorted(first), "CHUNK_FIRST is damaged")
        require(first[0] == 0 and first[-1] == len(tiles), "chunks of no tensor")
        require(partial == sorted(set(partial)) and set(partial) <= set(range(len(tiles))), "parts of no chunk")
        numbers, parts = iter(self.tables["PARTIAL_BOX"]), set(partial)
        self.boxes: list[Box] = []
        for i, (start, end) in enumerate(pairwise(first)):
            require(start == end or self.owners[i] == i, f"the alias {self.paths[i]} has chunks")
            require(tiles[start:end] == sorted(tiles[start:end]), f"the tiles of {self.paths[i]} fall")
            for row in range(start, end):
                box = _tile_box(self.shapes[i], self.tiles[i], tiles[row])
                self.boxes.append(_part_box(box, [next(numbers, 0) for _ in box * 2]) if row in parts else box)
        require(next(numbers, None) is None, "more boxes than parts")

    def tensors(self) -> dict[Keys, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of every tensor by its path."""
        return {path: (self.dtypes[i], self.shapes[i]) for path, i in self.index.items()}

    def kind(self, path: Keys) -> str:
        """Return what the user had at ``path``: a tensor, an array, or bytes."""
        return self.kinds[self.index[path]]

    def read(self, path: Keys) -> np.ndarray:
        """Return the bytes of a tensor, row-major and little-endian; each chunk was proved by its digest."""
        i = self.index[path]
        require(self.dtypes[i] in ITEM_SIZES, f"{path} has the unknown dtype {self.dtypes[i]}")
        require(self.kinds[i] in {"tensor", "numpy", "bytes", "bytes_io"}, f"{path} is of kind {self.kinds[i]}")
        item, owner = ITEM_SIZES[self.dtypes[i]], self.owners[i]
        rows = range(*self.tables["CHUNK_FIRST"][owner : owner + 2])
        sizes = [item * math.prod(part.stop - part.start for part in self.boxes[row]) for row in rows]
        require(sum(sizes) == item * math.prod(self.shapes[i]), f"the chunks of {path} leave something out, or overlap")
        for row, size in zip(rows, sizes, strict=True):
            require(size <= self.tables["CHUNK_LENGTH"][row] << 15, f"chunk {row} of {path} cannot be so long")
        tensor, missing = np.empty(self.shapes[i], f"V{item}"), np.ones(self.shapes[i], bool)
        for row, size in zip(rows, sizes, strict=True):
            box = self.boxes[row]
            require(missing[box].all(), f"the chunks of {path} overlap")
            missing[box] = False
            tensor[box] = np.frombuffer(self._read_chunk(row, size), f"V{item}").reshape(missing[box].shape)
        return tensor.reshape(-1).view(np.uint8)

    def read_torch(self, path: Keys) -> torch.Tensor:
        """Return a tensor as one of torch."""
        dtype, shape = self.tensors()[path]
        return torch.from_numpy(self.read(path)).view(getattr(torch, dtype)).reshape(shape)

    def _read_chunk(self, row: int, size: int) -> bytes:
        pack, digest, *entry = (self.tables[f"CHUNK_{n}"][row] for n in ("PACK", "DIGEST", "OFFSET", "LENGTH", "CODEC"))
        source = self.store.pack(self.tables["PACK_NAME"][pack], self.tables["PACK_SIZE"][pack])
        require(source.entries.get(digest) == tuple(entry), f"{source.path} does not list chunk {row}")
        stored = source.read(entry[0], entry[1])
        data = decode_zstd(stored, size) if entry[2] == 1 else stored
        require(len(data) == size and blake3(data).digest() == digest, f"chunk {row}, in {source.path}, is damaged")
        return data


def _grid(shape: tuple[int, ...], tile: tuple[int, ...]) -> list[int]:
    return [-(-n // t) for n, t in zip(shape, tile, strict=True)]


def _tile_box(shape: tuple[int, ...], tile: tuple[int, ...], number: int) -> Box:
    """Return the box of a tensor's tile, which are numbered row-major."""
    box, grid = [], _grid(shape, tile)
    require(number < math.prod(grid), f"there is no tile {number}")
    for n, t, steps in zip(reversed(shape), reversed(tile), reversed(grid), strict=True):
        number, place = divmod(number, steps)
        box.append(slice(place * t, min(n, place * t + t)))
    return tuple(reversed(box))


def _part_box(tile: Box, numbers: list[int]) -> Box:
    """Return the box of a part of a tile from its offsets and sizes."""
    offsets, sizes = numbers[: len(tile)], numbers[len(tile) :]
    box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    inside = all(t.start <= b.start < b.stop <= t.stop for t, b in zip(tile, box, strict=True))
    require(inside and box != tile, f"{box} is no part of {tile}")
    return box


# Packs


class Pack:
    """A pack whose footer has been checked; ``entries`` are offset, length and codec by the chunk's digest."""

    def __init__(self, path: Path, name: bytes, size: int) -> None:
        self.path = path
        require(path.is_file() and path.stat().st_size == size >= 20, f"{path} is missing or has another size")
        count, length, version, flags, magic = struct.unpack("<IIHH8s", self.read(size - 20, 20))
        require(magic == b"VSPACK\x1a\n" and 20 <= length <= size, f"{path} is no pack")
        footer = self.read(size - length, length)
        require(blake3(footer).digest() == name, f"the footer of {path} is damaged")
        require(version == 1 and flags == 0, f"{path} is of version {version}; known is 1")
        require(count > 0 and length == 45 * count + 20, f"the footer of {path} has another size")
        self.entries = {digest: tuple(entry) for digest, *entry in np.frombuffer(footer[:-20], PACK_ENTRY).tolist()}
        end = 0
        for offset, stored, codec in self.entries.values():
            require(offset == end and stored > 0 and codec <= 1, f"the entries of {path} are damaged")
            end += stored
        require(end == size - length and len(self.entries) == count, f"the entries of {path} do not tile it")

    def read(self, offset: int, length: int) -> bytes:
        """Return some of its bytes."""
        with self.path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
        require(len(data) == length, f"{self.path} is too short")
        return data


def decode_zstd(stored: bytes, size: int) -> bytes:
    """Return the ``size`` bytes of a chunk that is stored as planes in a zstd frame."""
    try:
        frame = zstandard.get_frame_parameters(stored[1:])
        require(stored[0] > 0 and frame.content_size == size and frame.dict_id == 0, "not the frame of this chunk")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(stored[1:], allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise DamagedError(f"not a zstd frame: {error}") from error
    chunk, start = np.empty(size, np.uint8), 0
    for index in range(min(stored[0], size)):
        plane = chunk[index :: stored[0]]
        plane[:] = planes[start : start + len(plane)]
        start += len(plane)
    return chunk.tobytes()


# The store


class Store:
    """A store in a local folder, in which the parts of keys are folders and files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.packs: dict[bytes, Pack] = {}
        self.root = unseal(self._get("store.json"), "store")
        require(self.root["major"] == 1, f"a store of version {self.root['major']}; known is 1")
        require(self.root["hash"] == "blake3-256", f"a store with the hash {self.root['hash']}")

    def _get(self, key: str) -> bytes:
        require((self.path / key).is_file(), f"there is no {key}")
        return (self.path / key).read_bytes()

    def _list(self, prefix: str) -> list[str]:
        folder = self.path / prefix
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def runs(self) -> list[str]:
        """Return the names of the runs that have a snapshot."""
        names = (unescape(entry) for entry in self._list("refs"))
        return [name for name in names if name is not None and self.snapshots(name)]

    def snapshots(self, run: str) -> dict[int, int]:
        """Return the steps of a run, ascending, each with its highest version."""
        found = (re.fullmatch(r"([0-9]{12})\.([0-9]{6})", entry) for entry in self._list(f"refs/{escape(run)}"))
        versions = sorted((int(match[1]), int(match[2])) for match in found if match)
        return {step: version for step, version in versions if version > 0}

    def tags(self, run: str) -> list[str]:
        """Return the tags of a run."""
        names = (unescape(entry) for entry in self._list(f"refs/{escape(run)}/tags"))
        return [name for name in names if name is not None and not re.fullmatch("[0-9]+", name)]

    def ref(self, run: str, step: int) -> dict[str, Any]:
        """Return the record of the highest version of a step."""
        version = self.snapshots(run).get(step)
        require(version, f"there is no {run}@{step}")
        record = unseal(self._get(f"refs/{escape(run)}/{step:012}.{version:06}"), "ref")
        same = (record["run"], record["step"], record["version"]) == (run, step, version)
        require(same, f"the ref of {run}@{step} is another one")
        return record

    def tag(self, run: str, tag: str) -> dict[str, Any]:
        """Return the record of a tag."""
        record = unseal(self._get(f"refs/{escape(run)}/tags/{escape(tag)}"), "tag")
        require((record["run"], record["tag"]) == (run, tag), f"the tag {run}@{tag} is another one")
        return record

    def open(self, name: str) -> Snapshot:
        """Return the snapshot ``run@step``, ``run@tag``, or ``run`` for its latest."""
        run, at, what = name.partition("@")
        if at and not re.fullmatch("[0-9]+", what):
            record = self.tag(run, what)
        else:
            record = self.ref(run, int(what) if at else max(self.snapshots(run), default=-1))
        digest = record["manifest"]
        require(re.fullmatch("[0-9a-f]{64}", digest), f"{digest!r} is no digest")
        manifest = self._get(f"manifests/{digest[:2]}/{digest}")
        require(blake3(manifest).hexdigest() == digest, f"the manifest {digest} is damaged")
        snapshot = Snapshot(self, manifest)
        same = (snapshot.head["run"], snapshot.head["step"]) == (run, record["step"])
        require(same, f"the manifest {digest} is of another snapshot than {name}")
        return snapshot

    def pack(self, name: bytes, size: int) -> Pack:
        """Return a pack of the store."""
        if name not in self.packs:
            self.packs[name] = Pack(self.path / f"packs/{name.hex()[:2]}/{name.hex()}", name, size)
        return self.packs[name]
