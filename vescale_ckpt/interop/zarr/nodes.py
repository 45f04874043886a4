"""The ``zarr.json`` of version 3: what is written of a tensor, and what is understood of a stranger's.

bfloat16 and 8-bit floats: the registry of zarr extensions has names for them, which TensorStore reads and zarr-python
does not. So a tensor of such a dtype is, unless asked otherwise, an array of unsigned integers of the same width, and
the attribute ``torch_dtype`` says what its bits are.
"""

from __future__ import annotations

import math
import re
import urllib.parse
from dataclasses import dataclass
from typing import Any, Final

import torch

from vescale_ckpt.errors import FormatError, InvalidInputError
from vescale_ckpt.format.json_text import decode_json, encode_json

DTYPE_ATTRIBUTE: Final = "torch_dtype"
NAME_ATTRIBUTE: Final = "name"
NODE_NAME: Final = "zarr.json"
CORE: Final[dict[torch.dtype, str]] = {
    getattr(torch, name): name
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""What every implementation of zarr has."""
EXTENSIONS: Final[dict[torch.dtype, str]] = {
    getattr(torch, name): name
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}
"""What the registry of extensions names."""
_CARRIERS: Final = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
_BY_NAME: Final = {name: dtype for dtype, name in {**CORE, **EXTENSIONS}.items()}
_PACKED: Final = frozenset({"zstd", "gzip"})
_PLAIN: Final = re.compile(r"[A-Za-z0-9._-]")
_MAX_CHUNK_BYTES: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """One array of a group."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    separator: str
    """Between the numbers of a chunk's key."""
    prefix: str
    """Before them."""
    big_endian: bool = False
    codecs: tuple[str, ...] = ()
    """What the chunks are packed with, in the order of packing."""

    def key(self, index: tuple[int, ...]) -> str:
        """Return the key of a chunk, relative to the array."""
        if self.prefix == "c":
            return self.separator.join(("c", *map(str, index)))
        return self.separator.join(map(str, index)) or "0"

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks, per dim."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))


def node_name(name: str) -> str:
    """Return a tensor's name as that of a node, which is also the name of a folder: other letters as ``%XX``."""
    text = "".join(
        char if _PLAIN.fullmatch(char) else urllib.parse.quote(char, safe="", errors="surrogatepass") for char in name
    )
    if text in {".", ".."} or text.startswith("__"):  # reserved
        text = f"%{ord(text[0]):02X}{text[1:]}"
    return text or "%00"


def tensor_name(node: str) -> str:
    """Return the tensor's name of a node's."""
    return urllib.parse.unquote(node, errors="surrogatepass")


def encode_group() -> bytes:
    """Return the ``zarr.json`` of a group."""
    return encode_json({"zarr_format": 3, "node_type": "group", "attributes": {}})


def encode_array(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], chunk: tuple[int, ...], *, extensions: bool = False
) -> bytes:
    """Return the ``zarr.json`` of a tensor's array.

    Args:
        name: of the tensor.
        dtype: of the tensor.
        shape: of the tensor.
        chunk: shape of a chunk.
        extensions: write bfloat16 and 8-bit floats by their registered names, which not everybody reads.

    Raises:
        InvalidInputError: zarr has no such dtype, and nothing of its width.
    """
    found = CORE.get(dtype) or (EXTENSIONS.get(dtype) if extensions else None)
    attributes: dict[str, Any] = {NAME_ATTRIBUTE: name}
    if found is None:
        found = _CARRIERS.get(dtype.itemsize)
        attributes[DTYPE_ATTRIBUTE] = str(dtype).removeprefix("torch.")
    if found is None:
        raise InvalidInputError(f"cannot show {name[:80]!r} as zarr, which has nothing for {dtype}", fqn=name)
    zero: Any = False if found == "bool" else [0.0, 0.0] if found.startswith("complex") else 0
    bytes_codec = {"name": "bytes", **({"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {})}
    return encode_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": found,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": zero,
            "codecs": [bytes_codec],
            "attributes": attributes,
        }
    )


def decode_node(data: bytes, what: str) -> tuple[ZarrArray | None, dict[str, Any]]:
    """Return the array of a ``zarr.json``, None for a group, and its attributes.

    Raises:
        FormatError: it is none, or uses what is not read here.
    """
    node = decode_json(data, what, floats=True)
    if not isinstance(node, dict) or node.get("zarr_format") != 3:
        raise FormatError(f"cannot read {what}: it is no zarr of version 3", path=what)
    attributes = node.get("attributes")
    attributes = attributes if isinstance(attributes, dict) else {}
    if node.get("node_type") == "group":
        return None, attributes
    try:
        array = _array(node, attributes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"cannot read {what}: it describes no array: {error!r:.100}", path=what) from error
    if array is None:
        raise FormatError(
            f"cannot read {what}: dtype {str(node.get('data_type'))[:60]}, grid {str(node.get('chunk_grid'))[:80]} and "
            f"codecs {str(node.get('codecs'))[:120]}; read are regular grids of numbers with the codecs bytes, zstd "
            "and gzip; open it with another program and write it so",
            path=what,
        )
    return array, attributes


def _array(node: dict[str, Any], attributes: dict[str, Any]) -> ZarrArray | None:
    stored = _BY_NAME.get(node["data_type"]) if isinstance(node["data_type"], str) else None
    shape = tuple(node["shape"])
    chunk = tuple(node["chunk_grid"]["configuration"]["chunk_shape"])
    encoding = node["chunk_key_encoding"]
    separator = encoding.get("configuration", {}).get("separator", "/" if encoding["name"] == "default" else ".")
    codecs = node["codecs"]
    first, rest = codecs[0], tuple(codec["name"] for codec in codecs[1:])
    good = (
        stored is not None
        and node["node_type"] == "array"
        and node["chunk_grid"]["name"] == "regular"
        and first["name"] == "bytes"
        and _PACKED.issuperset(rest)
        and len(shape) == len(chunk) <= 64
        and all(type(n) is int and 0 <= n < 2**62 for n in shape)
        and all(type(n) is int and 0 < n < 2**62 for n in chunk)
        and separator in {"/", "."}
        and encoding["name"] in {"default", "v2"}
    )
    if not good or stored is None or math.prod(chunk) * stored.itemsize > _MAX_CHUNK_BYTES:
        return None
    dtype = getattr(torch, str(attributes.get(DTYPE_ATTRIBUTE, "")), stored)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != stored.itemsize:
        return None
    prefix = "c" if encoding["name"] == "default" else ""
    big_endian = first.get("configuration", {}).get("endian") == "big" and dtype.itemsize > 1
    return ZarrArray(dtype, shape, chunk, separator, prefix, big_endian, rest)
