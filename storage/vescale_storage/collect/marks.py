"""Marks: the names of what a collection is going to delete, written down a grace period before it does.

A writer that begins while a mark is there refers to nothing that it names; one that began earlier has committed, or
has failed, by the time that the mark may be acted on. Whoever acts on a mark first creates its sweep record, of which
there can be one only, and the mark stays long enough after that for every writer to see it while deletions may still be
on their way. ``storage/FORMAT.md`` proves that this is enough.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from vescale_storage.digest import DIGEST_BYTES, digest, digest_parts
from vescale_storage.errors import ConfigError, CorruptionError, FormatError, UnsupportedVersionError
from vescale_storage.keys import GC_PREFIX
from vescale_storage.sealed import MAX_SECONDS, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vescale_storage.backend import Payload

DEFAULT_GRACE_SECONDS: Final = 24 * 3600.0
"""Far longer than any save may take: see ``SAVE_PART``."""
SAVE_PART: Final = 0.5
"""A save that has taken this part of a mark's grace period does not commit what the mark names."""
LATE_PART: Final = 0.25
"""A mark is put at most this part of its grace period after the time that it bears."""

MARK_MAGIC: Final = b"VSMARK\x1a\n"
MARK_VERSION: Final = 1
MAX_MARK_NAMES: Final = 1 << 20
"""Names in one mark; a collection that has more to mark writes several."""
OWNER_DIGITS: Final = 16

_HEADER: Final = struct.Struct("<8sHHIIQQ")
MARK_HEADER_BYTES: Final = _HEADER.size
MAX_MARK_BYTES: Final = MARK_HEADER_BYTES + (MAX_MARK_NAMES + 1) * DIGEST_BYTES
SWEEP_KIND: Final = "sweep"
MARK_KIND: Final = "mark"
CLOCK_KIND: Final = "clock"
_KEY: Final = re.compile(r"gc/(mark|sweep)-([0-9]{16}-[0-9a-f]{16})|gc/(clock)-([0-9a-f]{16})")
_MAX_NAME_CHARS: Final = 33


class GcKey(NamedTuple):
    """What a key under ``gc/`` says."""

    kind: str
    """``mark``, ``sweep`` or ``clock``."""
    name: str
    """Of the mark, also for its sweep."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What one collection found unreachable."""

    name: str
    """When it was made, in milliseconds, and random digits."""
    created_seconds: float
    grace_seconds: float
    """It may be acted on when it is older than this."""
    packs: frozenset[str]
    manifests: frozenset[str]

    @property
    def key(self) -> str:
        """Where it lies."""
        return mark_key(self.name)


@dataclass(frozen=True, slots=True)
class Sweep:
    """That somebody acts, or has acted, on a mark."""

    mark: str
    begun_seconds: float
    grace_seconds: float
    """Its deletions end within this; the mark stays for twice as long."""
    owner: str
    """Random digits: two collections never write equal records, so an answer that was lost can be told by its bytes."""

    @property
    def key(self) -> str:
        """Where it lies."""
        return sweep_key(self.mark)

    def is_over(self, now: float) -> bool:
        """Return whether its mark may go: no deletion of it can be on its way any more."""
        return now >= self.begun_seconds + 2 * self.grace_seconds


@dataclass(frozen=True, slots=True)
class Marked:
    """What writers must not refer to: the packs that some marks name, or all where a mark cannot be read."""

    packs: frozenset[str] = frozenset()
    unreadable: tuple[str, ...] = ()
    """Keys of marks that are damaged or of a newer version."""

    def __contains__(self, pack: object) -> bool:
        """Return whether this pack, by name, may be about to be deleted."""
        return bool(self.unreadable) or pack in self.packs


def refused(marks: Iterable[Mark], packs: Iterable[str], save_seconds: float) -> list[str]:
    """Return the packs that a save which has taken so long must not commit, as they may be about to be deleted."""
    late = [mark for mark in marks if save_seconds >= SAVE_PART * mark.grace_seconds]
    return [pack for pack in packs if any(pack in mark.packs for mark in late)]


# ---- keys


def mark_key(name: str) -> str:
    """Return the key of the mark with this name."""
    return f"{GC_PREFIX}{MARK_KIND}-{name}"


def sweep_key(name: str) -> str:
    """Return the key of the sweep record of the mark with this name."""
    return f"{GC_PREFIX}{SWEEP_KIND}-{name}"


def clock_key() -> str:
    """Return a fresh key for an object that is put only to see what time the storage gives it."""
    return f"{GC_PREFIX}{CLOCK_KIND}-{os.urandom(8).hex()}"


def new_mark_name(now: float) -> str:
    """Return a fresh name: the time in milliseconds and random digits."""
    return f"{_milliseconds(now):016d}-{os.urandom(8).hex()}"


def parse_gc_key(key: str) -> GcKey:
    """Return what a key under ``gc/`` says.

    Raises:
        FormatError: no collection makes this key.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise FormatError(f"{key!r} is no key of a collection", key=key)
    return GcKey(match[1] or match[3], match[2] or match[4])


# ---- bytes


def encode_mark(mark: Mark) -> Payload:
    """Return the mark's object.

    Raises:
        ConfigError: it has too many names.
    """
    num_names = len(mark.packs) + len(mark.manifests)
    if num_names > MAX_MARK_NAMES:
        raise ConfigError(f"cannot write a mark of {num_names} names: at most {MAX_MARK_NAMES} are allowed")
    created, grace = _milliseconds(mark.created_seconds), _milliseconds(mark.grace_seconds)
    header = _HEADER.pack(MARK_MAGIC, MARK_VERSION, 0, len(mark.packs), len(mark.manifests), created, grace)
    names = bytes.fromhex("".join([*sorted(mark.packs), *sorted(mark.manifests)]))
    return header, names, digest_parts((header, names))


def decode_mark(data: bytes | bytearray, key: str) -> Mark:
    """Return the mark that was found under ``key``.

    Raises:
        CorruptionError: the bytes were changed, or belong under another key.
        UnsupportedVersionError: a newer collection made it.
    """
    view = memoryview(data)
    if len(data) < MARK_HEADER_BYTES + DIGEST_BYTES or digest(view[:-DIGEST_BYTES]) != view[-DIGEST_BYTES:]:
        raise CorruptionError(
            f"cannot read {key!r}: the check of this mark of {len(data)} bytes does not hold; it was cut or changed "
            "after it was written",
            key=key,
        )
    magic, version, flags, num_packs, num_manifests, created, grace = _HEADER.unpack_from(data)
    if magic == MARK_MAGIC and (version != MARK_VERSION or flags):
        raise UnsupportedVersionError(
            f"cannot read {key!r}: it has version {version} and flags {flags:#x}, this reader knows version "
            f"{MARK_VERSION} without flags; upgrade vescale-ckpt",
            key=key,
        )
    kind, name = parse_gc_key(key)
    names = view[MARK_HEADER_BYTES:-DIGEST_BYTES]
    if (
        magic != MARK_MAGIC
        or kind != MARK_KIND
        or int(name.partition("-")[0]) != created
        or len(names) != (num_packs + num_manifests) * DIGEST_BYTES
    ):
        raise CorruptionError(f"cannot read {key!r}: it is no mark, or belongs under another key", key=key)
    hexed = names.hex()
    step = 2 * DIGEST_BYTES
    every = [hexed[step * i : step * (i + 1)] for i in range(num_packs + num_manifests)]
    return Mark(name, created / 1000, grace / 1000, frozenset(every[:num_packs]), frozenset(every[num_packs:]))


def encode_sweep(sweep: Sweep) -> bytes:
    """Return the sweep record's object."""
    fields = {
        "mark": sweep.mark,
        "begun": float(sweep.begun_seconds),
        "grace": float(sweep.grace_seconds),
        "owner": sweep.owner,
    }
    return seal(SWEEP_KIND, fields)


def decode_sweep(data: bytes | bytearray, key: str) -> Sweep:
    """Return the sweep record that was found under ``key``.

    Raises:
        CorruptionError, FormatError, UnsupportedVersionError: as for ``sealed.unseal``.
    """
    fields = unseal(data, kind=SWEEP_KIND, key=key)
    fields.expect("mark", parse_gc_key(key).name)
    return Sweep(
        fields.text("mark", _MAX_NAME_CHARS),
        fields.seconds("begun"),
        fields.seconds("grace"),
        fields.hex("owner", OWNER_DIGITS),
    )


def _milliseconds(seconds: float) -> int:
    if not 0 <= seconds < MAX_SECONDS / 1000:
        raise ConfigError(f"cannot write the time {seconds!r}: expected seconds, 0 or more")
    return round(seconds * 1000)


def split_marks(packs: Iterable[str], manifests: Iterable[str], *, now: float, grace_seconds: float) -> list[Mark]:
    """Return marks that name all of these, as many as their size allows; none for nothing."""
    names = [*((name, True) for name in sorted(packs)), *((name, False) for name in sorted(manifests))]
    parts = [names[i : i + MAX_MARK_NAMES] for i in range(0, len(names), MAX_MARK_NAMES)]
    return [_mark_of(part, now, grace_seconds) for part in parts]


def _mark_of(part: Sequence[tuple[str, bool]], now: float, grace_seconds: float) -> Mark:
    return Mark(
        new_mark_name(now),
        now,
        grace_seconds,
        frozenset(name for name, is_pack in part if is_pack),
        frozenset(name for name, is_pack in part if not is_pack),
    )
