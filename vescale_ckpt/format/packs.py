"""The pack table as two columns: 32 bytes of name and 8 of size, in the order that chunks count them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.format.document import Section
from vescale_ckpt.format.records import PackRecord
from vescale_storage.digest import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.document import Document

_NAME: Final = re.compile(r"[0-9a-f]{64}")


def pack_sizes(packs: Sequence[PackRecord]) -> npt.NDArray[np.uint64]:
    """Return the sizes of packs as a column."""
    return np.fromiter((pack.size_bytes for pack in packs), np.uint64, len(packs))


def check_packs(packs: Sequence[PackRecord], what: str) -> None:
    """Refuse a table with a name that is none, or twice the same.

    Raises:
        CorruptionError: names it.
    """
    seen = set()
    for index, pack in enumerate(packs):
        if not _NAME.fullmatch(pack.name) or pack.name in seen or not 0 < pack.size_bytes < 2**63:
            raise CorruptionError(f"cannot use the {what}: pack {index} is {pack}, which is none or comes twice")
        seen.add(pack.name)


def encode_packs(packs: Sequence[PackRecord], name_kind: int, size_kind: int) -> list[Section]:
    """Return the sections of a pack table that ``check_packs`` has passed."""
    names = b"".join([bytes.fromhex(pack.name) for pack in packs])
    return [Section(name_kind, names), Section(size_kind, pack_sizes(packs))]


def decode_packs(document: Document, name_kind: int, size_kind: int) -> tuple[PackRecord, ...]:
    """Return the pack table of a document.

    Raises:
        FormatError: a section is not there.
        CorruptionError: they do not fit together.
    """
    names = document.column(name_kind, np.uint8, DIGEST_BYTES)
    sizes = document.column(size_kind, np.uint64)
    if len(names) != len(sizes):
        raise CorruptionError(f"cannot use the {document.what}: it names {len(names)} packs and sizes {len(sizes)}")
    hexed = names.tobytes().hex()
    step = 2 * DIGEST_BYTES
    packs = tuple([PackRecord(hexed[step * i : step * (i + 1)], size) for i, size in enumerate(sizes.tolist())])
    check_packs(packs, document.what)
    return packs
