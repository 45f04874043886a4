from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid

import pytest

from vescale_storage import loop
from vescale_storage.backends import open_backend
from vescale_storage.errors import (
    AlreadyExistsError,
    ConfigError,
    CorruptionError,
    FormatError,
    ObjectNotFoundError,
    StorageError,
    StoreNotFoundError,
    UnsupportedVersionError,
)
from vescale_storage.root import STORE_VERSION, Root, create_or_open_root, encode_root
from vescale_storage.sealed import seal
from vescale_storage.wrappers.faults import FaultBackend

ROOT = Root("ab" * 16, STORE_VERSION, "blake3-256", 1.5)


def memory():
    return open_backend(f"memory://{uuid.uuid4().hex}")


def without_conditional_put():
    backend = memory()
    backend.capabilities = dataclasses.replace(backend.capabilities, conditional_put=False)
    return backend


def test_create_then_open():
    async def main():
        backend = memory()
        with pytest.raises(StoreNotFoundError, match="create=True"):
            await create_or_open_root(backend, create=False)
        made = await create_or_open_root(backend, create=True, now=5.0)
        assert made == Root(made.id, (1, 0), "blake3-256", 5.0)
        assert await create_or_open_root(backend, create=False) == made
        assert await create_or_open_root(backend, create=True, now=6.0) == made
        assert await create_or_open_root(backend, create=False, read_only=True) == made
        assert json.loads(await backend.get("store.json"))["hash"] == "blake3-256"
        assert (await create_or_open_root(memory(), create=True)).id != made.id

    loop.run(main())


def test_racing_creators_agree():
    async def main():
        backend = memory()
        roots = await asyncio.gather(*[create_or_open_root(backend, create=True) for _ in range(20)])
        assert len(set(roots)) == 1

    loop.run(main())


@pytest.mark.parametrize("error", [StorageError("reset", retryable=True), AlreadyExistsError("retried")])
def test_a_lost_answer_is_read_back(error):
    async def main():
        backend = FaultBackend(memory())
        backend.lose_answer("put_if_absent", error)
        made = await create_or_open_root(backend, create=True)
        assert await create_or_open_root(backend, create=False) == made

    loop.run(main())


@pytest.mark.parametrize("create", [True, False])
def test_somebody_elses_folder_is_refused(create):
    async def main():
        backend = memory()
        await backend.put("thesis/chapter-1.tex", [b"..."])
        with pytest.raises(ConfigError, match=r"is not a store, it holds 'thesis/chapter-1\.tex'"):
            await create_or_open_root(backend, create=create)

    loop.run(main())


@pytest.mark.parametrize("create", [True, False])
def test_a_store_that_lost_its_root_is_damage(create):
    async def main():
        backend = memory()
        await backend.put("packs/ab/cd", [b"..."])
        with pytest.raises(CorruptionError, match=r"no store\.json"):
            await create_or_open_root(backend, create=create)

    loop.run(main())


@pytest.mark.parametrize("create", [True, False])
def test_a_store_that_appears_during_the_look_is_opened(create):
    async def main():
        inner = memory()
        await inner.put("store.json", [encode_root(ROOT)])
        await inner.put("packs/ab/cd", [b"..."])
        backend = FaultBackend(inner)
        rule = backend.fail("head", ObjectNotFoundError("not yet"))
        assert await create_or_open_root(backend, create=create) == ROOT
        assert rule.num_hit == 1

    loop.run(main())


def test_every_flipped_byte_every_cut_and_every_addition_is_corruption():
    async def main():
        data = encode_root(ROOT)
        backend = memory()
        damaged = [
            data[:i] + bytes([data[i] ^ bits]) + data[i + 1 :] for i in range(len(data)) for bits in (1, 32, 255)
        ]
        damaged += [data[:i] for i in range(len(data))] + [data[i:] for i in range(1, len(data))]
        damaged += [data + b"\x00", data + b"\n", b"{}", b"hello", b"x" * 100_000]
        for bad in damaged:
            await backend.put("store.json", [bad])
            with pytest.raises(CorruptionError, match=r"store\.json"):
                await create_or_open_root(backend, create=True)
            assert await backend.get("store.json") == bad

    loop.run(main())


FIELDS = {"id": "ab" * 16, "major": 1, "minor": 0, "hash": "blake3-256", "created": 1.5}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"major": 2}, UnsupportedVersionError),
        ({"hash": "sha256"}, UnsupportedVersionError),
        ({"hash": "\x1b[2J"}, UnsupportedVersionError),
        ({"major": 0}, FormatError),
        ({"major": "1"}, FormatError),
        ({"minor": -1}, FormatError),
        ({"id": "ab"}, FormatError),
        ({"id": None}, FormatError),
        ({"created": "today"}, FormatError),
        ({"hash": "x" * 50}, FormatError),
    ],
)
def test_newer_stores_and_nonsense(change, error):
    async def main():
        backend = memory()
        await backend.put("store.json", [seal("store", {**FIELDS, **change})])
        with pytest.raises(error) as caught:
            await create_or_open_root(backend, create=False)
        assert "store.json" in str(caught.value)
        assert str(caught.value).isprintable()

    loop.run(main())


def test_a_newer_minor_and_unknown_fields_are_fine():
    async def main():
        backend = memory()
        await backend.put("store.json", [seal("store", {**FIELDS, "minor": 7, "new": {"a": [1]}})])
        assert (await create_or_open_root(backend, create=False)).version == (1, 7)

    loop.run(main())


def test_another_record_is_not_a_root():
    async def main():
        backend = memory()
        await backend.put("store.json", [seal("ref", FIELDS)])
        with pytest.raises(CorruptionError):
            await create_or_open_root(backend, create=False)

    loop.run(main())


def test_a_back_end_without_create_only_put_is_refused_with_ways_out():
    async def main():
        backend = without_conditional_put()
        for create in (True, False):
            with pytest.raises(ConfigError, match="unsafe_no_conditional_put"):
                await create_or_open_root(backend, create=create)
        made = await create_or_open_root(backend, create=True, unsafe_no_conditional_put=True)
        assert await create_or_open_root(backend, create=False, read_only=True) == made
        with pytest.raises(ConfigError, match="read-only"):
            await create_or_open_root(backend, create=True, read_only=True)

    loop.run(main())
