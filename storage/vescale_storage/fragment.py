"""What the ranks of a save tell each other through storage: fragments and abort records.

A fragment is what a rank contributes to the manifest; its content is the caller's. Its envelope binds it to transaction
and rank and ends with a BLAKE3, so that nothing cut, changed or misplaced is taken for a contribution.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vescale_storage.digest import DIGEST_BYTES, digest, digest_parts
from vescale_storage.errors import ConfigError, CorruptionError, FormatError, UnsupportedVersionError
from vescale_storage.keys import MAX_RANK, abort_key, fragment_key
from vescale_storage.sealed import seal, unseal

if TYPE_CHECKING:
    from vescale_storage.backend import Buffer, Payload

FRAGMENT_MAGIC: Final = b"VSFRAG\x1a\n"
FRAGMENT_VERSION: Final = 1
MAX_FRAGMENT_BYTES: Final = 1 << 30
"""Of the whole object. A chunk takes some 64 bytes, so this is the part of 16 million chunks."""

MAX_MESSAGE_CHARS: Final = 4000
MAX_KIND_CHARS: Final = 100
MAX_FAILURES: Final = 64
"""Other ranks that one abort record speaks of; texts at their bounds stay below ``sealed.MAX_RECORD_BYTES``."""
_MAX_FAILURE_CHARS: Final = 400

_HEADER: Final = struct.Struct("<8sHHI16s")
FRAGMENT_HEADER_BYTES: Final = _HEADER.size
_ABORT_KIND: Final = "abort"


def encode_fragment(transaction: str, rank: int, content: Buffer) -> Payload:
    """Return the fragment's object around ``content``, which is not copied.

    Raises:
        ConfigError: transaction or rank are out of range, or the content is too long.
    """
    _ = fragment_key(transaction, rank)  # refuse what no reader would accept
    size = FRAGMENT_HEADER_BYTES + len(content) + DIGEST_BYTES
    if size > MAX_FRAGMENT_BYTES:
        raise ConfigError(f"cannot write a fragment of {size} bytes: at most {MAX_FRAGMENT_BYTES} are allowed")
    header = _HEADER.pack(FRAGMENT_MAGIC, FRAGMENT_VERSION, 0, rank, bytes.fromhex(transaction))
    return header, content, digest_parts((header, content))


def decode_fragment(data: bytes | bytearray, transaction: str, rank: int) -> memoryview:
    """Return the content of the fragment that was found under this transaction and rank, uncopied.

    Raises:
        CorruptionError: the bytes were changed, or belong elsewhere.
        UnsupportedVersionError: a newer writer made it.
    """
    key = fragment_key(transaction, rank)
    view = memoryview(data)
    if len(data) < FRAGMENT_HEADER_BYTES + DIGEST_BYTES or digest(view[:-DIGEST_BYTES]) != view[-DIGEST_BYTES:]:
        raise CorruptionError(
            f"cannot read {key!r}: the check of this fragment of {len(data)} bytes does not hold; it was cut or "
            "changed after it was written",
            key=key,
            rank=rank,
        )
    magic, version, flags, found_rank, found_transaction = _HEADER.unpack_from(data)
    if magic != FRAGMENT_MAGIC or found_rank != rank or found_transaction.hex() != transaction:
        raise CorruptionError(
            f"cannot read {key!r}: it is no fragment, or that of rank {found_rank} in {found_transaction.hex()}",
            key=key,
            rank=rank,
        )
    if version != FRAGMENT_VERSION or flags != 0:
        raise UnsupportedVersionError(
            f"cannot read {key!r}: it has version {version} and flags {flags:#x}, this reader knows version "
            f"{FRAGMENT_VERSION} without flags; run the same version of vescale-ckpt on all ranks",
            key=key,
            rank=rank,
        )
    return view[FRAGMENT_HEADER_BYTES:-DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class AbortRecord:
    """Why a rank gave up a save."""

    transaction: str
    rank: int
    kind: str
    """The error's ``kind``."""
    message: str
    failures: dict[int, str] = field(default_factory=dict)
    """From the coordinator: what it knows of the ranks that made the save fail."""


def encode_abort(record: AbortRecord) -> bytes:
    """Return the record's object, with texts cut to what readers accept.

    Raises:
        ConfigError: transaction or rank are out of range.
    """
    _ = abort_key(record.transaction, record.rank)
    first = sorted(record.failures.items())[:MAX_FAILURES]
    fields = {
        "transaction": record.transaction,
        "rank": record.rank,
        "error": _clip(record.kind, MAX_KIND_CHARS),
        "message": _clip(record.message, MAX_MESSAGE_CHARS),
        "failures": {str(rank): _clip(text, _MAX_FAILURE_CHARS) for rank, text in first},
    }
    return seal(_ABORT_KIND, fields)


def decode_abort(data: bytes | bytearray, transaction: str, rank: int) -> AbortRecord:
    """Return the record that was found under this transaction and rank.

    Raises:
        CorruptionError, FormatError, UnsupportedVersionError: as for ``sealed.unseal``.
    """
    key = abort_key(transaction, rank)
    fields = unseal(data, kind=_ABORT_KIND, key=key)
    fields.expect("transaction", transaction)
    fields.expect("rank", rank)
    failures = {}
    for text_rank, text in fields.texts("failures", MAX_FAILURES, _MAX_FAILURE_CHARS).items():
        if not (text_rank.isascii() and text_rank.isdigit()) or len(text_rank) > len(str(MAX_RANK)):
            raise FormatError(f"cannot read {key!r}: its failures name {text_rank[:20]!a} as a rank", key=key)
        failures[int(text_rank)] = text
    return AbortRecord(
        transaction, rank, fields.text("error", MAX_KIND_CHARS), fields.text("message", MAX_MESSAGE_CHARS), failures
    )


def _clip(text: str, max_chars: int) -> str:
    """Return the beginning of ``text`` that takes at most ``max_chars`` in JSON, where a letter can take twelve."""
    # Lone surrogates come from file names; readers refuse them.
    clean = text[: max_chars + 1].encode("utf-8", "replace").decode("utf-8")
    size = len(json.dumps(clean)) - 2
    if size <= max_chars:
        return clean
    room = max_chars - 4
    while (size := len(json.dumps(clean)) - 2) > room:
        clean = clean[: min(len(clean) * room // size, len(clean) - 1)]
    return f"{clean} ..."
