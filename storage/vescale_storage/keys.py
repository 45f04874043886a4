"""Names: how runs, steps, tags, packs and transactions become keys under a store's root, and back.

Run and tag names are chosen by people and may hold anything that can be seen; keys hold only ``[A-Za-z0-9._%-]`` and
``/``, so that no file system, URL or glob in between can read a meaning into them. Every ``parse_*`` accepts exactly
what its counterpart makes: one object has one key.
"""

from __future__ import annotations

import operator
import re
import unicodedata
from typing import TYPE_CHECKING, Final, NamedTuple

from vescale_storage.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

STORE_KEY: Final = "store.json"
PACKS_PREFIX: Final = "packs/"
MANIFESTS_PREFIX: Final = "manifests/"
REFS_PREFIX: Final = "refs/"
TRANSACTIONS_PREFIX: Final = "txn/"
GC_PREFIX: Final = "gc/"
INDEX_PREFIX: Final = "index/"

MAX_NAME_BYTES: Final = 200
"""Longest encoded name: file systems allow 255 bytes, and a temporary name needs a suffix."""
MAX_STEP: Final = 10**12 - 1
MAX_VERSION: Final = 10**6 - 1
MAX_RANK: Final = 10**7 - 1
TRANSACTION_DIGITS: Final = 32

_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_UNSEEN_CATEGORIES: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})  # controls, lone surrogates, line and paragraph ends
_ENCODED_NAME: Final = re.compile(r"(?:[A-Za-z0-9._-]|%[0-9A-F]{2})+")
_HEX_64: Final = re.compile(r"[0-9a-f]{64}")
_HEX_32: Final = re.compile(r"[0-9a-f]{32}")
_BLOB_KEY: Final = re.compile(r"([0-9a-f]{2})/([0-9a-f]{64})")
_REF_KEY: Final = re.compile(r"refs/([^/]+)/([0-9]{12})\.([0-9]{6})")
_TAG_KEY: Final = re.compile(r"refs/([^/]+)/tags/([^/]+)")
_TRANSACTION_KEY: Final = re.compile(r"txn/([0-9a-f]{32})/(rank|abort)-(0|[1-9][0-9]{0,6})")


class RefKey(NamedTuple):
    """What a ref's key says."""

    run: str
    step: int
    version: int


class TagKey(NamedTuple):
    """What a tag's key says."""

    run: str
    tag: str


class TransactionKey(NamedTuple):
    """What the key of a fragment or of an abort record says."""

    transaction: str
    rank: int
    is_abort: bool


# ---- names


def validate_run(name: str) -> str:
    """Return ``name`` if it can name a run.

    Raises:
        ConfigError: it is empty, ``.`` or ``..``, holds ``/``, ``@`` or a control character, or is too long.
    """
    return _validate_name(name, "run")


def validate_tag(name: str) -> str:
    """Return ``name`` if it can name a tag: as for a run, and not digits only, which would read as a step.

    Raises:
        ConfigError: it cannot.
    """
    _validate_name(name, "tag")
    if name.isascii() and name.isdigit():
        raise ConfigError(f"cannot use {name!r} as a tag: digits only name a step; add a letter")
    return name


def _validate_name(name: str, noun: str) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"cannot use {name!r} as a {noun}: it is a {type(name).__name__}, not a str")
    if name in {"", ".", ".."}:
        raise ConfigError(f"cannot use {name!r} as a {noun}: it names nothing; choose another name")
    for letter in name:
        if letter in "/@" or unicodedata.category(letter) in _UNSEEN_CATEGORIES:
            raise ConfigError(
                f"cannot use {name!r} as a {noun}: it holds {letter!r}; '/', '@', control characters and line ends "
                "are not allowed"
            )
    num_bytes = len(_encode(name))
    if num_bytes > MAX_NAME_BYTES:
        raise ConfigError(
            f"cannot use {name[:40]!r}... as a {noun}: it takes {num_bytes} bytes as a key (letters outside "
            f"[A-Za-z0-9._-] take three a UTF-8 byte), at most {MAX_NAME_BYTES} are allowed"
        )
    return name


def encode_name(name: str) -> str:
    """Return ``name`` with every byte of its UTF-8 form outside ``[A-Za-z0-9._-]`` written as ``%XX``.

    Raises:
        ConfigError: the name holds a lone surrogate.
    """
    try:
        return _encode(name)
    except UnicodeEncodeError as error:
        raise ConfigError(f"cannot encode the name {name!r}: it is not valid Unicode") from error


def _encode(name: str) -> str:
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in name.encode())


def decode_name(encoded: str) -> str:
    """Return the name that ``encode_name`` turned into ``encoded``.

    Raises:
        FormatError: ``encode_name`` never returns this text.
    """
    if not _ENCODED_NAME.fullmatch(encoded):
        raise FormatError(f"cannot decode the name {encoded!r}: expected [A-Za-z0-9._-] and %XX only")
    data = re.sub(r"%(..)", lambda match: chr(int(match[1], 16)), encoded).encode("latin-1")
    try:
        name = data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"cannot decode the name {encoded!r}: its bytes are not UTF-8") from error
    if _encode(name) != encoded:
        raise FormatError(f"cannot decode the name {encoded!r}: it is spelled {_encode(name)!r}")
    return name


# ---- blobs


def pack_key(name: str) -> str:
    """Return the key of the pack with this name (64 hex digits).

    Raises:
        ConfigError: that is no such name.
    """
    return f"{PACKS_PREFIX}{_split_hex(name, 'pack')}"


def manifest_key(digest_hex: str) -> str:
    """Return the key of the manifest with this digest (64 hex digits).

    Raises:
        ConfigError: that is no such digest.
    """
    return f"{MANIFESTS_PREFIX}{_split_hex(digest_hex, 'manifest')}"


def index_key(digest_hex: str) -> str:
    """Return the key of the index object of the manifest with this digest.

    Raises:
        ConfigError: it is no digest in hex.
    """
    return f"{INDEX_PREFIX}{_split_hex(digest_hex, 'manifest')}"


def parse_index_key(key: str) -> str:
    """Return the digest, in hex, of the manifest that an index object is of.

    Raises:
        FormatError: the key is not that of an index object.
    """
    return _parse_blob_key(key, INDEX_PREFIX, "index object")


def _split_hex(name: str, noun: str) -> str:
    if not _HEX_64.fullmatch(name):
        raise ConfigError(f"cannot make the key of {noun} {name!r}: expected 64 lower-case hex digits")
    return f"{name[:2]}/{name}"


def parse_pack_key(key: str) -> str:
    """Return the pack's name.

    Raises:
        FormatError: this is no pack's key.
    """
    return _parse_blob_key(key, PACKS_PREFIX, "pack")


def parse_manifest_key(key: str) -> str:
    """Return the manifest's digest in hex.

    Raises:
        FormatError: this is no manifest's key.
    """
    return _parse_blob_key(key, MANIFESTS_PREFIX, "manifest")


def _parse_blob_key(key: str, prefix: str, noun: str) -> str:
    match = _BLOB_KEY.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
    if match is None or match[1] != match[2][:2]:
        raise FormatError(f"{key!r} is no key of a {noun}; expected {prefix}<2 hex>/<64 hex>", key=key)
    return match[2]


# ---- refs and tags


def run_prefix(run: str) -> str:
    """Return the prefix of all refs and tags of a run.

    Raises:
        ConfigError: the name cannot name a run.
    """
    return f"{REFS_PREFIX}{encode_name(validate_run(run))}/"


def step_prefix(run: str, step: int) -> str:
    """Return the prefix of all versions of one step of a run.

    Raises:
        ConfigError: run or step are out of range.
    """
    return f"{run_prefix(run)}{_in_range(step, 0, MAX_STEP, 'step'):012d}."


def ref_key(run: str, step: int, version: int) -> str:
    """Return the key of one version of a step's ref.

    Raises:
        ConfigError: run, step or version are out of range; versions start at 1.
    """
    return f"{step_prefix(run, step)}{_in_range(version, 1, MAX_VERSION, 'version'):06d}"


def parse_ref_key(key: str) -> RefKey:
    """Return run, step and version.

    Raises:
        FormatError: this is no ref's key.
    """
    match = _REF_KEY.fullmatch(key)
    if match is None or int(match[3]) == 0:
        raise FormatError(
            f"{key!r} is no key of a ref; expected refs/<run>/<step, 12 digits>.<version, 6 digits>", key=key
        )
    return RefKey(_decode_key_name(match[1], key, validate_run), int(match[2]), int(match[3]))


def tags_prefix(run: str) -> str:
    """Return the prefix of all tags of a run.

    Raises:
        ConfigError: the name cannot name a run.
    """
    return f"{run_prefix(run)}tags/"


def tag_key(run: str, tag: str) -> str:
    """Return the key of a tag.

    Raises:
        ConfigError: run or tag are no such names.
    """
    return f"{tags_prefix(run)}{encode_name(validate_tag(tag))}"


def parse_tag_key(key: str) -> TagKey:
    """Return run and tag.

    Raises:
        FormatError: this is no tag's key.
    """
    match = _TAG_KEY.fullmatch(key)
    if match is None:
        raise FormatError(f"{key!r} is no key of a tag; expected refs/<run>/tags/<tag>", key=key)
    return TagKey(_decode_key_name(match[1], key, validate_run), _decode_key_name(match[2], key, validate_tag))


def _decode_key_name(encoded: str, key: str, validate: Callable[[str], str]) -> str:
    name = decode_name(encoded)
    try:
        return validate(name)
    except ConfigError as error:
        raise FormatError(f"{key!r} holds a name that no writer makes: {error}", key=key) from error


# ---- transactions


def transaction_prefix(transaction: str) -> str:
    """Return the prefix of everything that belongs to a transaction (32 hex digits).

    Raises:
        ConfigError: that is no such id.
    """
    if not _HEX_32.fullmatch(transaction):
        raise ConfigError(f"cannot use {transaction!r} as a transaction id: expected 32 lower-case hex digits")
    return f"{TRANSACTIONS_PREFIX}{transaction}/"


def abort_prefix(transaction: str) -> str:
    """Return the prefix of a transaction's abort records.

    Raises:
        ConfigError: that is no transaction id.
    """
    return f"{transaction_prefix(transaction)}abort-"


def fragment_key(transaction: str, rank: int) -> str:
    """Return the key of a rank's fragment.

    Raises:
        ConfigError: transaction or rank are out of range.
    """
    return f"{transaction_prefix(transaction)}rank-{_in_range(rank, 0, MAX_RANK, 'rank')}"


def abort_key(transaction: str, rank: int) -> str:
    """Return the key of a rank's abort record.

    Raises:
        ConfigError: transaction or rank are out of range.
    """
    return f"{abort_prefix(transaction)}{_in_range(rank, 0, MAX_RANK, 'rank')}"


def parse_transaction_key(key: str) -> TransactionKey:
    """Return transaction, rank and whether it is an abort record.

    Raises:
        FormatError: this is the key of neither a fragment nor an abort record.
    """
    match = _TRANSACTION_KEY.fullmatch(key)
    if match is None:
        raise FormatError(f"{key!r} is no key of a transaction; expected txn/<32 hex>/rank-<n> or abort-<n>", key=key)
    return TransactionKey(match[1], int(match[3]), match[2] == "abort")


def _in_range(value: int, low: int, high: int, noun: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= operator.index(value) <= high:
        raise ConfigError(f"cannot use {value!r} as a {noun}: expected an int from {low} to {high}")
    return operator.index(value)
