"""The root: the one small object that says that a place is a store, and of which format.

Every other part of the store may then trust that it does not write into somebody else's folder.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vescale_storage.digest import HASH_NAME
from vescale_storage.errors import (
    ConfigError,
    CorruptionError,
    ObjectNotFoundError,
    StoreNotFoundError,
    UnsupportedVersionError,
)
from vescale_storage.keys import (
    GC_PREFIX,
    INDEX_PREFIX,
    MANIFESTS_PREFIX,
    PACKS_PREFIX,
    REFS_PREFIX,
    STORE_KEY,
    TRANSACTIONS_PREFIX,
)
from vescale_storage.sealed import MAX_RECORD_BYTES, put_once, read_bounded, seal, unseal

if TYPE_CHECKING:
    from vescale_storage.backend import Backend

STORE_VERSION: Final = (1, 0)
"""(major, minor) of the layout: a reader refuses a higher major and ignores what a higher minor adds."""

_KIND: Final = "store"
_ID_DIGITS: Final = 32
_MAX_VERSION_NUMBER: Final = 10**6
_OWN_PREFIXES: Final = (PACKS_PREFIX, MANIFESTS_PREFIX, REFS_PREFIX, TRANSACTIONS_PREFIX, GC_PREFIX, INDEX_PREFIX)


@dataclass(frozen=True, slots=True)
class Root:
    """What ``store.json`` says."""

    id: str
    """32 hex digits, drawn when the store was made: two stores at one URL over time are told apart by it."""
    version: tuple[int, int]
    hash_name: str
    created_seconds: float


async def create_or_open_root(
    backend: Backend,
    create: bool,
    *,
    read_only: bool = False,
    unsafe_no_conditional_put: bool = False,
    now: float | None = None,
) -> Root:
    """Return the root of the store behind ``backend``; with ``create``, make it where there is nothing yet.

    Of several racing creators one wins and all return its root.

    Raises:
        StoreNotFoundError: there is nothing, and ``create`` is false.
        ConfigError: something is there that is no store; or the back end cannot put create-only, and neither
            ``read_only`` nor ``unsafe_no_conditional_put`` is given.
        CorruptionError: ``store.json`` was changed after it was written, or is gone from a store.
        UnsupportedVersionError: a newer writer made the store.
        StorageError: the storage failed.
    """
    if create and read_only:
        raise ConfigError(f"cannot create a store at {backend.url} that is opened read-only; pass one of the two")
    if not (backend.capabilities.conditional_put or read_only or unsafe_no_conditional_put):
        raise ConfigError(
            f"cannot save safely at {backend.url}: it has no create-only put, so two saves at once could overwrite "
            "each other's ref; use storage that has one, open it read_only, or, if never more than one process saves "
            "there, pass unsafe_no_conditional_put=True"
        )
    found: str | None = None
    for _ in range(2):  # twice, as another creator may come between the first look and the listing
        try:
            return _decode(await read_bounded(backend, STORE_KEY, MAX_RECORD_BYTES))
        except ObjectNotFoundError:
            found = await _first_key(backend)
        if found is None:
            break
    if found is not None:
        raise _not_a_store(backend, found)
    if not create:
        raise StoreNotFoundError(f"there is no store at {backend.url}: check the place, or create one with create=True")
    root = Root(os.urandom(_ID_DIGITS // 2).hex(), STORE_VERSION, HASH_NAME, time.time() if now is None else now)
    return _decode(await put_once(backend, STORE_KEY, encode_root(root)))


def encode_root(root: Root) -> bytes:
    """Return the bytes of ``store.json``."""
    major, minor = root.version
    return seal(
        _KIND,
        {"id": root.id, "major": major, "minor": minor, "hash": root.hash_name, "created": float(root.created_seconds)},
    )


def _decode(data: bytes | bytearray) -> Root:
    fields = unseal(data, kind=_KIND, key=STORE_KEY)
    version = fields.integer("major", 1, _MAX_VERSION_NUMBER), fields.integer("minor", 0, _MAX_VERSION_NUMBER)
    hash_name = fields.text("hash", 40)
    if version[0] > STORE_VERSION[0] or hash_name != HASH_NAME:
        raise UnsupportedVersionError(
            f"cannot open the store: {STORE_KEY} says version {version[0]}.{version[1]} with hash {hash_name!a}, "
            f"this reader knows {STORE_VERSION[0]}.x with {HASH_NAME}; upgrade vescale-ckpt",
            key=STORE_KEY,
        )
    return Root(fields.hex("id", _ID_DIGITS), version, hash_name, fields.seconds("created"))


async def _first_key(backend: Backend) -> str | None:
    async for info in backend.list(""):
        return info.key
    return None


def _not_a_store(backend: Backend, found: str) -> ConfigError | CorruptionError:
    if found.startswith(_OWN_PREFIXES):
        return CorruptionError(
            f"cannot open the store at {backend.url}: it holds {found!a} but no {STORE_KEY}; if that was deleted, put "
            "it back from a copy",
            key=STORE_KEY,
        )
    return ConfigError(
        f"cannot open a store at {backend.url}: it is not a store, it holds {found!a} and no {STORE_KEY}; choose an "
        "empty place",
        key=STORE_KEY,
    )
