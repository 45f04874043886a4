"""Manifests in storage: read by name with their digest checked, written once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vescale_ckpt.errors import AlreadyExistsError, CorruptionError, ObjectNotFoundError, StorageError
from vescale_ckpt.format.manifest import decode_manifest, encode_manifest, manifest_name
from vescale_storage import loop
from vescale_storage.keys import manifest_key

if TYPE_CHECKING:
    from vescale_ckpt.format.records import Manifest
    from vescale_storage.backend import Backend
    from vescale_storage.refs import Ref

logger = logging.getLogger(__name__)


def fetch_manifest(backend: Backend, ref: Ref) -> bytes:
    """Return the encoded manifest that a ref points to, after its digest was found right.

    One that does not match is asked for again, past every cache, and then from the mirror if there is one.

    Raises:
        CorruptionError: it is gone or damaged.
    """
    key = manifest_key(ref.manifest)
    where = f"{ref.run}@{ref.step}"
    try:
        data = loop.run(backend.get(key))
    except ObjectNotFoundError as error:
        raise CorruptionError(
            f"cannot open {where}: its manifest {key} is not in {backend.url} - the ref outlived it, or the store was "
            "copied in part - load another snapshot or bring the object back",
            key=key,
            snapshot=where,
        ) from error
    if manifest_name(data) == ref.manifest:
        return data
    again = _fetch_again(backend, key, ref.manifest)
    if again is not None:
        return again
    raise CorruptionError(
        f"cannot open {where}: the {len(data)} bytes of {key} in {backend.url} do not have the digest in "
        "its name - the storage changed or cut them - load another snapshot or bring the object back",
        key=key,
        snapshot=where,
    )


def _fetch_again(backend: Backend, key: str, name: str) -> bytes | None:
    """Return what the first copy of the store gives that has this name, or None if none does."""
    loop.run(backend.forget(key))
    for number, copy in enumerate(backend.copies()):
        try:
            data = loop.run(copy.get(key))
        except (ObjectNotFoundError, StorageError):
            continue
        if manifest_name(data) == name:
            if number:
                logger.warning(
                    "%s in %s is damaged: it was read from the mirror %s - repair the store with heal()",
                    key,
                    backend.url,
                    copy.url,
                )
            return data
    return None


def open_manifest(data: bytes, ref: Ref) -> Manifest:
    """Return the decoded manifest, after it was found to be the one that the ref means.

    Raises:
        FormatError: it cannot be understood.
        CorruptionError: it is another snapshot's.
    """
    manifest = decode_manifest(data)
    if (manifest.run, manifest.step) != (ref.run, ref.step):
        raise CorruptionError(
            f"cannot open {ref.run}@{ref.step}: its ref points to the manifest of {manifest.run}@{manifest.step}",
            key=manifest_key(ref.manifest),
        )
    return manifest


def store_manifest(backend: Backend, manifest: Manifest) -> str:
    """Put a manifest under the digest of its bytes and return that; one that is there already is the same one."""
    data = encode_manifest(manifest)
    name = manifest_name(data)
    try:
        loop.run(backend.put_if_absent(manifest_key(name), [data]))
    except AlreadyExistsError:
        if manifest_name(loop.run(backend.get(manifest_key(name)))) != name:  # a damaged one is in the way
            loop.run(backend.put(manifest_key(name), [data]))
    return name
