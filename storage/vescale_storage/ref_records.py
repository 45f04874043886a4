"""What a ref, a tag and a snapshot's name say: frozen values, their bytes, and their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vescale_storage.errors import ConfigError
from vescale_storage.keys import (
    MAX_STEP,
    MAX_VERSION,
    TRANSACTION_DIGITS,
    manifest_key,
    parse_ref_key,
    parse_tag_key,
    ref_key,
    tag_key,
    transaction_prefix,
    validate_run,
    validate_tag,
)
from vescale_storage.sealed import MAX_SECONDS, seal, unseal

if TYPE_CHECKING:
    from vescale_storage.sealed import Fields

_REF_KIND: Final = "ref"
_TAG_KIND: Final = "tag"
_MANIFEST_DIGITS: Final = 64


@dataclass(frozen=True, slots=True)
class Ref:
    """One version of ``run@step``: which manifest it is."""

    run: str
    step: int
    version: int
    """From 1; the highest is what readers take."""
    manifest: str
    """64 hex digits: BLAKE3 of the manifest."""
    transaction: str
    """32 hex digits: the save that made it."""
    created_seconds: float
    """Seconds since the epoch, by the clock of the rank that committed."""

    @property
    def key(self) -> str:
        """Where it lies."""
        return ref_key(self.run, self.step, self.version)


@dataclass(frozen=True, slots=True)
class Tag:
    """A name that stays on one version of one step of its run."""

    name: str
    ref: Ref
    """All that the ref says, so that a tag can be read without it."""
    created_seconds: float

    @property
    def key(self) -> str:
        """Where it lies."""
        return tag_key(self.ref.run, self.name)


@dataclass(frozen=True, slots=True)
class SnapshotName:
    """What people type: ``run``, ``run@step`` or ``run@tag``; with neither, the newest step is meant."""

    run: str
    step: int | None = None
    tag: str | None = None


def parse_name(text: str) -> SnapshotName:
    """Return what ``run``, ``run@step`` or ``run@tag`` means; digits after the ``@`` are a step.

    Raises:
        ConfigError: it is none of these.
    """
    run, at, rest = text.partition("@")
    validate_run(run)
    if not at:
        return SnapshotName(run)
    if not (rest.isascii() and rest.isdigit()):
        return SnapshotName(run, tag=validate_tag(rest))
    digits = rest.lstrip("0") or "0"
    if len(digits) > len(str(MAX_STEP)):
        raise ConfigError(f"cannot use {rest[:40]!r} as a step: expected an int from 0 to {MAX_STEP}")
    return SnapshotName(run, step=int(digits))


def encode_ref(ref: Ref) -> bytes:
    """Return the ref's object.

    Raises:
        ConfigError: a field cannot stand in a ref.
    """
    return seal(_REF_KIND, _ref_fields(ref))


def decode_ref(data: bytes | bytearray, key: str) -> Ref:
    """Return the ref that was found under ``key``.

    Raises:
        CorruptionError: the bytes were changed, or belong under another key.
        FormatError: no writer of this format makes them.
        UnsupportedVersionError: a newer writer made them.
    """
    fields = unseal(data, kind=_REF_KIND, key=key)
    run, step, version = parse_ref_key(key)
    fields.expect("run", run)
    fields.expect("step", step)
    fields.expect("version", version)
    return _ref_from(fields, run)


def encode_tag(tag: Tag) -> bytes:
    """Return the tag's object.

    Raises:
        ConfigError: a field cannot stand in a tag.
    """
    _ = tag.key  # refuse a name that no reader would accept
    return seal(_TAG_KIND, {**_ref_fields(tag.ref), "tag": tag.name, "tagged": _seconds(tag.created_seconds)})


def decode_tag(data: bytes | bytearray, key: str) -> Tag:
    """Return the tag that was found under ``key``.

    Raises:
        CorruptionError, FormatError, UnsupportedVersionError: as for ``decode_ref``.
    """
    fields = unseal(data, kind=_TAG_KIND, key=key)
    run, name = parse_tag_key(key)
    fields.expect("run", run)
    fields.expect("tag", name)
    return Tag(name, _ref_from(fields, run), fields.seconds("tagged"))


def _ref_fields(ref: Ref) -> dict[str, object]:
    _ = ref.key, manifest_key(ref.manifest), transaction_prefix(ref.transaction)  # refuse what no reader would accept
    return {
        "run": ref.run,
        "step": ref.step,
        "version": ref.version,
        "manifest": ref.manifest,
        "transaction": ref.transaction,
        "created": _seconds(ref.created_seconds),
    }


def _ref_from(fields: Fields, run: str) -> Ref:
    return Ref(
        run,
        fields.integer("step", 0, MAX_STEP),
        fields.integer("version", 1, MAX_VERSION),
        fields.hex("manifest", _MANIFEST_DIGITS),
        fields.hex("transaction", TRANSACTION_DIGITS),
        fields.seconds("created"),
    )


def _seconds(value: float) -> float:
    if not 0 <= value < MAX_SECONDS:
        raise ConfigError(f"cannot write the time {value!r}: expected seconds since the epoch")
    return float(value)
