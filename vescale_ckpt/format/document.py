"""A document: the frame around manifests and fragments, a header and a table of typed sections.

The table comes first, so a reader knows every length before it touches a section, and a section is used where it lies:
nothing is copied, and nothing is allocated by a number that the file cannot back.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from vescale_ckpt.errors import CorruptionError, FormatError, InternalError, UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    from vescale_storage.backend import Buffer

HEADER: Final = struct.Struct("<8sHHIQ")
"""Magic, major version, minor version, number of sections, bytes of the whole document."""
ENTRY: Final = struct.Struct("<HHIQQ")
"""Kind, flags, zero, offset from the document's start, bytes without padding."""
FLAG_REQUIRED: Final = 1
"""A reader that does not know this section must not read the document."""
ALIGNMENT: Final = 8
"""Sections start at multiples of it, so that columns can be used in place."""
MAX_SECTIONS: Final = 1024

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Section:
    """One section to be written."""

    kind: int
    payload: Buffer | npt.NDArray[np.generic]
    required: bool = True


@dataclass(frozen=True, slots=True)
class Document:
    """A document that was taken apart; its sections are read-only views of its bytes."""

    what: str
    """``manifest`` or ``fragment``, for messages."""
    version: tuple[int, int]
    sections: dict[int, memoryview]

    def section(self, kind: int) -> memoryview:
        """Return a section that must be there.

        Raises:
            FormatError: it is not.
        """
        if kind not in self.sections:
            raise FormatError(f"cannot read the {self.what}: its section {kind} is not there")
        return self.sections[kind]

    def column(self, kind: int, dtype: type[Scalar], width: int = 1) -> npt.NDArray[Scalar]:
        """Return a section as a read-only little-endian column, ``[n]`` or, for wider items, ``[n, width]``.

        Raises:
            FormatError: the section is not there.
            CorruptionError: its length is no multiple of the item's.
        """
        view = self.section(kind)
        little = np.dtype(dtype).newbyteorder("<")
        if len(view) % (little.itemsize * width):
            raise CorruptionError(
                f"cannot read the {self.what}: section {kind} has {len(view)} bytes, no multiple of "
                f"{little.itemsize * width}"
            )
        # frombuffer refuses an empty buffer
        column = np.frombuffer(view, little) if len(view) else np.frombuffer(bytes(little.itemsize), little)[:0]
        return column.reshape(-1, width) if width > 1 else column


def encode_document(magic: bytes, version: tuple[int, int], sections: Sequence[Section]) -> bytes:
    """Return the bytes of a document; sections are written in order of their kinds."""
    ordered = sorted(sections, key=lambda section: section.kind)
    payloads = [_raw(section.payload) for section in ordered]
    at = HEADER.size + ENTRY.size * len(ordered)
    entries: list[bytes] = []
    body: list[Buffer] = []
    for section, payload in zip(ordered, payloads, strict=True):
        entries.append(ENTRY.pack(section.kind, FLAG_REQUIRED if section.required else 0, 0, at, len(payload)))
        padding = -len(payload) % ALIGNMENT
        body += [payload, bytes(padding)]
        at += len(payload) + padding
    if len({section.kind for section in ordered}) != len(ordered) or len(ordered) > MAX_SECTIONS:
        raise InternalError(f"a document cannot have the sections {[section.kind for section in ordered]}")
    return b"".join([HEADER.pack(magic, *version, len(ordered), at), *entries, *body])


def decode_document(
    data: Buffer, *, magic: bytes, version: tuple[int, int], what: str, known: Collection[int]
) -> Document:
    """Return a document taken apart; sections of unknown kinds are left out.

    Raises:
        FormatError: it does not start like one.
        UnsupportedVersionError: it is of another major version, or demands a section that this version does not know.
        CorruptionError: it is cut short, or its table does not describe it.
    """
    view = memoryview(data).toreadonly().cast("B")
    if len(view) < HEADER.size or view[: len(magic)] != magic:
        raise FormatError(f"cannot read the {what}: {len(view)} bytes that start with {bytes(view[:8])!r} are none")
    _, major, minor, num_sections, size_bytes = HEADER.unpack_from(view)
    if major != version[0]:
        raise UnsupportedVersionError(
            f"cannot read the {what}: it has format version {major}.{minor}, this reader knows {version[0]}.x up to "
            f"{version[0]}.{version[1]}; use a {'newer' if major > version[0] else 'fitting'} vescale-ckpt",
            found=(major, minor),
            supported=version,
        )
    if size_bytes != len(view) or num_sections > MAX_SECTIONS:
        raise CorruptionError(
            f"cannot read the {what}: it says that it has {size_bytes} bytes and {num_sections} sections, "
            f"and has {len(view)} bytes"
        )
    sections: dict[int, memoryview] = {}
    at, last_kind = HEADER.size + ENTRY.size * num_sections, -1
    if at > len(view):
        raise CorruptionError(f"cannot read the {what}: {len(view)} bytes are too few for {num_sections} sections")
    for index in range(num_sections):
        kind, flags, zero, offset, length = ENTRY.unpack_from(view, HEADER.size + ENTRY.size * index)
        end = offset + length + -length % ALIGNMENT
        if kind <= last_kind or zero or offset != at or end > len(view) or any(view[offset + length : end]):
            raise CorruptionError(f"cannot read the {what}: entry {index} of its table of sections does not hold")
        if kind in known:
            sections[kind] = view[offset : offset + length]
        elif flags & FLAG_REQUIRED:
            raise UnsupportedVersionError(
                f"cannot read the {what}: it is of version {major}.{minor} and needs its section {kind}, which this "
                f"reader of version {version[0]}.{version[1]} does not know; use a newer vescale-ckpt",
                found=(major, minor),
                supported=version,
            )
        at, last_kind = end, kind
    if at != len(view):
        raise CorruptionError(f"cannot read the {what}: {len(view) - at} bytes at its end belong to no section")
    return Document(what, (major, minor), sections)


def _raw(payload: Buffer | npt.NDArray[np.generic]) -> memoryview:
    """Return the bytes of a payload; of an array, little-endian and row-major."""
    if isinstance(payload, np.ndarray):
        little = payload.dtype.newbyteorder("<")
        flat = np.ascontiguousarray(payload.astype(little, copy=False)).reshape(-1)
        return flat.view(np.uint8).data
    return memoryview(payload).cast("B")
