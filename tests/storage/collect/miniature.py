"""A small store for the tests of collection: manifests are lists of packs, and every object's time is chosen."""

from __future__ import annotations

import json
import uuid

from vescale_storage import loop, refs
from vescale_storage.backends.memory import MemoryBackend, _Object
from vescale_storage.collect.roots import RootReader
from vescale_storage.collect.sweep import Collector
from vescale_storage.digest import hexdigest
from vescale_storage.errors import FormatError
from vescale_storage.keys import manifest_key, pack_key

HOUR = 3600.0
DAY = 24 * HOUR


def packs_of(data: bytes) -> list[str]:
    try:
        return json.loads(data)
    except ValueError as error:
        raise FormatError("no JSON") from error


def name(text: str) -> str:
    """Return the 64 digits that stand for a pack."""
    return hexdigest(text.encode())


class World:
    """A store in memory whose clock the test holds."""

    def __init__(self) -> None:
        self.backend = MemoryBackend(uuid.uuid4().hex)
        self.now = 1_000_000.0
        self.num_commits = 0

    def put(self, key: str, data: bytes = b"data") -> str:
        self.backend._objects[key] = _Object(data, self.now)
        return key

    def date(self, key: str) -> None:
        """Give an object the time of now."""
        self.backend._objects[key] = _Object(self.backend._objects[key].content, self.now)

    def pack(self, text: str, data: bytes = b"chunks") -> str:
        return self.put(pack_key(name(text)), data)

    def manifest(self, *packs: str) -> str:
        data = json.dumps([name(pack) for pack in packs]).encode()
        self.put(manifest_key(hexdigest(data)), data)
        return hexdigest(data)

    def commit(self, step: int, *packs: str, run: str = "run") -> refs.Ref:
        """Put packs, a manifest and a ref."""
        for pack in packs:
            if pack_key(name(pack)) not in self.backend._objects:
                self.pack(pack)
        self.num_commits += 1
        ref = loop.run(
            refs.create_ref(
                self.backend,
                run,
                step,
                manifest=self.manifest(*packs),
                transaction=f"{self.num_commits:032x}",
                now=self.now,
            )
        )
        self.date(ref.key)
        return ref

    def collect(self, *, backend=None, grace=HOUR, dry_run=False, progress=None):
        backend = backend or self.backend
        collector = Collector(
            backend, RootReader(backend, packs_of), grace_seconds=grace, now=self.now, progress=progress
        )
        return loop.run(collector.collect(dry_run=dry_run))

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.backend._objects if key.startswith(prefix))

    def has(self, *packs: str) -> list[bool]:
        return [pack_key(name(pack)) in self.backend._objects for pack in packs]
