"""Damaged and hostile checkpoints: name -> what to open. Whatever runs code leaves a folder named MARKER."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 -- the attack
import struct
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Marker:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def safetensors(header, data, length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


GOOD = {"w": entry([2, 2], 0, 16)}

FILES = {
    "truncated_data.safetensors": safetensors(GOOD, bytes(9)),
    "truncated_header.safetensors": safetensors(GOOD, b"")[:20],
    "seven_bytes.safetensors": b"\x01" * 7,
    "empty.safetensors": b"",
    "header_longer_than_file.safetensors": safetensors(GOOD, bytes(16), length=10_000),
    "header_of_exabytes.safetensors": safetensors(GOOD, bytes(16), length=1 << 62),
    "not_json.safetensors": safetensors(b"{nope", bytes(16)),
    "unknown_dtype.safetensors": safetensors({"w": entry([2, 2], 0, 16, "F99")}, bytes(16)),
    "shape_and_range.safetensors": safetensors({"w": entry([1000, 1000], 0, 4)}, bytes(4)),
    "range_past_end.safetensors": safetensors({"w": entry([4], 100, 116)}, bytes(16)),
    "overlap.safetensors": safetensors({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, bytes(24)),
    "twice.safetensors": safetensors(
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "is_really_a_zip.safetensors": b"PK\x03\x04" + bytes(200),
    "half_a_zip.pt": b"PK\x03\x04" + bytes(200),
    "nothing.pt": b"",
    "legacy.pt": pickle.dumps(0x1950A86A20F9469CFC6C, 2),
}


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)


def tensor_pickle(key="0", numel=4, offset=0, shape=(2, 2), strides=(2, 1)) -> bytes:
    """A torch.save pickle of ``{"w": tensor}``, written opcode by opcode so that its numbers may be any."""

    def number(n):
        return b"\x8a\x08" + struct.pack("<q", n)

    def sizes(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + number(numel) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + sizes(shape) + sizes(strides)
    return b"\x80\x02}" + text("w") + tensor + b"\x89" + hooks + b"tRs."


def build(folder: Path) -> dict[str, Path]:
    """Write them all below a folder and return name -> path."""
    made = {}
    for name, blob in FILES.items():
        made[name] = folder / name
        made[name].write_bytes(blob)
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes(safetensors(GOOD, bytes(16)))
    for name, target in {"parent": "../outside.safetensors", "absolute": str(outside)}.items():
        made[f"index_{name}"] = folder / f"index_{name}"
        made[f"index_{name}"].mkdir()
        text = json.dumps({"weight_map": {"w": target}})
        (made[f"index_{name}"] / "model.safetensors.index.json").write_text(text)
    made["link_outside"] = folder / "link_outside"
    made["link_outside"].mkdir()
    (made["link_outside"] / "model.safetensors").symlink_to(outside)
    made["pipe"] = folder / "pipe"
    made["pipe"].mkdir()
    os.mkfifo(made["pipe"] / "model.safetensors")
    made |= _pickles(folder) | _archives(folder)
    return made


def _pickles(folder: Path) -> dict[str, Path]:
    doubled = b"\x80\x04](K\x01e\x94" + b"".join(b"](h%ch%ce\x94" % (n, n) for n in range(60)) + b"."
    bomb = b"\x80\x04]\x94" + b"(h\x00h\x00h\x00h\x00e" * 20_000 + b"."
    pickles = {
        "code": pickle.dumps(Marker(folder / "MARKER")),
        "inner_code": pickle.dumps({"a": [Marker(folder / "MARKER")]}),
        "cut": pickle.dumps({"a": 1})[:-3],
        "no_table": pickle.dumps({"a": 1}),
        "loop": b"\x80\x04]\x94h\x00a.",
        "bomb": bomb,
        "doubled": doubled,
        "memo_of_gigabytes": b"\x80\x04]r\xff\xff\xff\xff.",
        "text_of_gigabytes": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0fabc.",
        "instance": b"(ios\nsystem\n.",
        "extension": b"\x80\x02\x82\x01.",
        "getattr": b"\x80\x04cbuiltins\ngetattr\n(]X\x05\x00\x00\x00cleartR.",
    }
    made = {}
    for name, text in pickles.items():
        made[f"dcp_{name}"] = folder / f"dcp_{name}"
        made[f"dcp_{name}"].mkdir()
        (made[f"dcp_{name}"] / ".metadata").write_bytes(text)
        if name not in {"no_table", "memo_of_gigabytes"}:  # which are values like any other
            made[f"{name}.pt"] = folder / f"{name}.pt"
            archive(made[f"{name}.pt"], {"x/data.pkl": text, "x/version": b"3\n"})
    return made


def _archives(folder: Path) -> dict[str, Path]:
    data = {"x/version": b"3\n", "x/data/0": bytes(16)}
    archives = {
        "no_storage.pt": {"x/data.pkl": tensor_pickle(key="7"), **data},
        "short_storage.pt": {"x/data.pkl": tensor_pickle(numel=400), **data},
        "view_past_end.pt": {"x/data.pkl": tensor_pickle(offset=2), **data},
        "view_of_exabytes.pt": {"x/data.pkl": tensor_pickle(shape=(1 << 40, 1 << 10), strides=(0, 0)), **data},
        "negative_stride.pt": {"x/data.pkl": tensor_pickle(strides=(-2, 1)), **data},
        "no_pickle.pt": data,
        "two_pickles.pt": {"x/data.pkl": tensor_pickle(), "y/data.pkl": tensor_pickle(), **data},
    }
    made = {}
    for name, members in archives.items():
        made[name] = folder / name
        archive(made[name], members)
    made["packed.pt"] = folder / "packed.pt"
    archive(made["packed.pt"], {"x/data.pkl": tensor_pickle(), "x/data/0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    return made
