import asyncio
import os
import uuid

import pytest

from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.errors import InvalidInputError, ObjectNotFoundError
from vescale_storage.testing_support import equal, fork_and_wait, keys_of, pattern, read, refused, true


def test_equal_and_true():
    equal(1, 1, "number")
    with pytest.raises(AssertionError, match=r"^content: found b'x+\.\.\. \(1003 characters\), expected b''$"):
        equal(b"x" * 1000, b"", "content")
    true(True, "x")
    with pytest.raises(AssertionError, match="does not hold: x"):
        true(False, "x")


def test_refused():
    async def check():
        backend = MemoryBackend(uuid.uuid4().hex)
        assert isinstance(await refused(ObjectNotFoundError, backend.get("k")), ObjectNotFoundError)
        with pytest.raises(AssertionError, match=r"expected InvalidInputError, but the call returned \[\]"):
            await refused(InvalidInputError, backend.leftovers())
        with pytest.raises(ObjectNotFoundError):
            await refused(InvalidInputError, backend.get("k"))

    asyncio.run(check())


def test_read_and_keys():
    async def check():
        backend = MemoryBackend(uuid.uuid4().hex)
        await backend.put("a/k", [b"0123"])
        assert await read(backend, "a/k", 1, 2) == b"12"
        assert await keys_of(backend, "a") == ["a/k"]

    asyncio.run(check())


def test_pattern():
    assert pattern(100, seed=1) == pattern(100, seed=1)
    assert pattern(100, seed=1) != pattern(100, seed=2)
    assert len(pattern(0, seed=1)) == 0


def test_fork_and_wait(monkeypatch, capfd):
    parent = os.getpid()

    async def good():
        assert os.getpid() != parent

    async def bad():
        raise RuntimeError("of the child")

    assert fork_and_wait(good) == 0
    assert fork_and_wait(bad) == 1
    assert "of the child" in capfd.readouterr().err
    monkeypatch.setattr("vescale_storage.testing_support._CHILD_SECONDS", 0.3)
    with pytest.raises(AssertionError, match="hung for"):
        fork_and_wait(lambda: asyncio.sleep(60))
