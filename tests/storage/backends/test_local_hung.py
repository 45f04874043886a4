"""A mount whose server is gone: every wait ends, and nothing goes wrong when the server comes back later."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vescale_storage.backends import posix
from vescale_storage.backends.local import LocalBackend
from vescale_storage.errors import ObjectNotFoundError, StorageTimeoutError
from vescale_storage.testing import keys_of
from vescale_storage.wrappers.retry import RetryBackend, RetryPolicy

POLICY = RetryPolicy(max_attempts=2, deadline_seconds=0.1, min_bytes_per_second=2.0**40, first_delay_seconds=0.01)
CONTENT = b"x" * 1000


class Hang:
    """A call that hangs until it is released."""

    def __init__(self, function):
        self.function = function
        self.began = threading.Event()
        self.ended = threading.Event()
        self.release = threading.Event()

    def as_method(self):
        """Return it as what a class can hold: it then gets the object as its first argument."""

        def call(*args, **kwargs):
            return self(*args, **kwargs)

        return call

    def __call__(self, *args, **kwargs):
        self.began.set()
        self.release.wait(30)
        try:
            return self.function(*args, **kwargs)
        finally:
            self.ended.set()


@pytest.fixture
def local(tmp_path):
    backend = LocalBackend(tmp_path / "store")
    backend._threads.grace_seconds = 0.1
    asyncio.run(backend.put("a/k", [CONTENT]))
    return backend


def refused(backend, attempt):
    """Return the error of a request that hangs, and how long it took."""

    async def run():
        began = time.monotonic()
        with pytest.raises(StorageTimeoutError) as caught:
            await attempt(RetryBackend(backend, POLICY))
        return caught.value, time.monotonic() - began

    error, seconds = asyncio.run(run())
    assert seconds < 10
    assert backend.url in error.message
    return error


@pytest.mark.parametrize(
    ("name", "attempt", "key"),
    [
        ("stat", lambda backend: backend.head("a/k"), "a/k"),
        ("open", lambda backend: backend.get("a/k"), "a/k"),
        ("scandir", lambda backend: keys_of(backend, "a/"), "a/"),
    ],
)
def test_what_only_looks_is_abandoned_and_tried_again(local, monkeypatch, name, attempt, key):
    owner = os if name == "scandir" else Path
    hang = Hang(getattr(owner, name))
    monkeypatch.setattr(owner, name, hang if owner is os else hang.as_method())
    error = refused(local, attempt)
    hang.release.set()
    assert error.retryable
    assert error.context["key"] == key
    assert "2 attempts" in error.message


def test_a_read_that_hangs_takes_the_buffer_with_it(local, monkeypatch):
    """No second attempt is made into a buffer that the first may still fill."""
    hang = Hang(os.preadv)
    monkeypatch.setattr(os, "preadv", hang)
    out = bytearray(100)
    error = refused(local, lambda backend: backend.get_into("a/k", 0, memoryview(out)))
    assert not error.retryable
    assert error.context["key"] == "a/k"
    assert out == bytes(100)
    hang.release.set()
    assert hang.ended.wait(10)
    assert out == CONTENT[:100]  # which is why the contract says: never use it again


@pytest.mark.parametrize("name", ["write_all", "sync_file"])
def test_a_put_that_hangs_never_shows_what_the_caller_has_overwritten(local, monkeypatch, name):
    hang = Hang(getattr(posix, name))
    monkeypatch.setattr(posix, name, hang)
    buffer = bytearray(CONTENT)
    error = refused(local, lambda backend: backend.put_if_absent("b/k", [buffer]))
    assert not error.retryable
    assert error.context["key"] == "b/k"
    buffer[:] = bytes(len(buffer))
    hang.release.set()
    assert hang.ended.wait(10)
    end = time.monotonic() + 10
    while any((local.root / ".tmp").iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    assert list((local.root / ".tmp").iterdir()) == []
    with pytest.raises(ObjectNotFoundError):
        asyncio.run(local.head("b/k"))


def test_a_put_that_hangs_while_it_appears_is_whole_if_it_does(local, monkeypatch):
    hang = Hang(Path.hardlink_to)
    monkeypatch.setattr(Path, "hardlink_to", hang.as_method())
    buffer = bytearray(CONTENT)
    refused(local, lambda backend: backend.put_if_absent("b/k", [buffer]))
    buffer[:] = bytes(len(buffer))
    hang.release.set()
    assert hang.ended.wait(10)
    assert asyncio.run(local.get("b/k")) == CONTENT


def test_a_read_that_hangs_does_not_keep_the_interpreter_from_ending(tmp_path):
    code = f"""
import os, threading
from vescale_storage import loop
from vescale_storage.backends.local import LocalBackend
from vescale_storage.errors import StorageTimeoutError
from vescale_storage.wrappers.retry import RetryBackend, RetryPolicy
local = LocalBackend({str(tmp_path)!r})
local._threads.grace_seconds = 0.1
backend = RetryBackend(local, RetryPolicy(deadline_seconds=0.1))
loop.run(backend.put("k", [b"x"]))
os.preadv = lambda *_: threading.Event().wait()
try:
    loop.run(backend.get_into("k", 0, memoryview(bytearray(1))))
except StorageTimeoutError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True, text=True)
    assert "cannot get 'k'" in done.stdout
