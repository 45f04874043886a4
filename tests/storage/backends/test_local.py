import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from vescale_storage.backend import Leftover
from vescale_storage.backends import local, posix
from vescale_storage.backends.local import LocalBackend
from vescale_storage.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    CorruptionError,
    InvalidInputError,
    NoSpaceError,
    StorageError,
)
from vescale_storage.testing import BackendConformance, keys_of


class TestConformance(BackendConformance):
    names_may_clash = False

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.root = tmp_path / "store"

    def make(self):
        return LocalBackend(self.root)

    def make_again(self, backend):
        return LocalBackend(backend.root)


class TestConformanceNotDurable(TestConformance):
    def make(self):
        return LocalBackend(self.root, durable=False, num_threads=1)


@pytest.fixture
def backend(tmp_path):
    return LocalBackend(tmp_path / "store")


def files_under(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_objects_are_plain_files(backend):
    asyncio.run(backend.put("packs/ab/cd", [b"one", b"two"]))
    assert files_under(backend.root) == ["packs/ab/cd"]
    assert (backend.root / "packs/ab/cd").read_bytes() == b"onetwo"


def test_the_umask_decides_who_may_read(backend):
    asyncio.run(backend.put("k", [b"x"]))
    umask = os.umask(0)
    os.umask(umask)
    assert (backend.root / "k").stat().st_mode & 0o777 == 0o666 & ~umask


def test_everything_is_synced_before_a_put_returns(backend, monkeypatch):
    steps = []
    link = Path.hardlink_to
    monkeypatch.setattr(posix, "sync_file", lambda _: steps.append("file"))
    monkeypatch.setattr(posix, "sync_folder", lambda path: steps.append(str(path.relative_to(backend.root.parent))))
    monkeypatch.setattr(Path, "hardlink_to", lambda path, temp: (steps.append("link"), link(path, temp)))
    asyncio.run(backend.put_if_absent("a/b/c", [b"x"]))
    # Entries of new folders in their parents, the bytes, and at last the name that makes them visible.
    assert steps == [".", "store", "file", "store", "store/a", "link", "store/a/b"]
    steps.clear()
    asyncio.run(backend.put_if_absent("a/b/d", [b"x"]))
    assert steps == ["file", "link", "store/a/b"]


def test_a_folder_that_another_process_made_is_synced_as_well(backend, monkeypatch):
    asyncio.run(backend.put("a/x", [b"x"]))
    (backend.root / "a/b").mkdir()  # who made it may not have come to sync it
    synced = []
    monkeypatch.setattr(posix, "sync_folder", lambda path: synced.append(path.name))
    asyncio.run(backend.put("a/b/c", [b"x"]))
    assert synced == ["a", "b"]


def test_not_durable_syncs_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        pytest.fail("synced")

    monkeypatch.setattr(posix, "sync_file", refuse)
    monkeypatch.setattr(posix, "sync_folder", refuse)
    monkeypatch.setattr(posix, "start_writeback", refuse)
    backend = LocalBackend(tmp_path / "store", durable=False)
    asyncio.run(backend.put_if_absent("a/b", [b"x"]))
    asyncio.run(backend.delete("a/b"))
    assert not backend.capabilities.durable


def test_writing_and_reading_copy_nothing(backend):
    async def check():
        payload = [memoryview(bytes(1000) + bytes(range(256)) * 4096)] * 64
        out = memoryview(bytearray(sum(len(view) for view in payload)))
        await backend.put("warm", [b"x"])
        tracemalloc.start()
        try:
            await backend.put("k", payload)
            await backend.get_into("k", 0, out)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert asyncio.run(check()) < 2**20


def test_short_writes_and_reads_are_continued(backend, monkeypatch):
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:7]]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:5]], offset))

    async def check():
        content = bytes(range(200))
        await backend.put("k", [content[:50], b"", content[50:51], content[51:]])
        out = bytearray(100)
        await backend.get_into("k", 10, memoryview(out))
        assert (await backend.get("k"), bytes(out)) == (content, content[10:110])

    asyncio.run(check())


def test_many_small_buffers(backend):
    async def check():
        payload = [bytes([number % 256]) * (number % 3) for number in range(5000)]
        await backend.put("k", payload)
        assert await backend.get("k") == b"".join(payload)

    asyncio.run(check())


def test_a_file_cut_while_it_is_read_is_damage(backend, monkeypatch):
    asyncio.run(backend.put("k", [bytes(100)]))
    fstat = os.fstat

    def cut_afterwards(descriptor):
        status = fstat(descriptor)
        os.truncate(backend.root / "k", 50)
        return status

    monkeypatch.setattr(os, "fstat", cut_afterwards)
    with pytest.raises(CorruptionError, match="has only 50 bytes"):
        asyncio.run(backend.get_into("k", 0, memoryview(bytearray(100))))


# Errors


@pytest.mark.parametrize(
    ("code", "kind", "retryable"),
    [
        (errno.ENOSPC, NoSpaceError, False),
        (errno.EDQUOT, NoSpaceError, False),
        (errno.EACCES, AccessDeniedError, False),
        (errno.EROFS, AccessDeniedError, False),
        (errno.EIO, StorageError, True),
        (errno.EXDEV, StorageError, False),
    ],
)
def test_failed_puts_say_why_and_leave_nothing(backend, monkeypatch, code, kind, retryable):
    asyncio.run(backend.put("k", [b"old"]))

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "writev", fail)
    for put in (backend.put, backend.put_if_absent):
        key = "k" if put == backend.put else "new"
        with pytest.raises(kind) as caught:
            asyncio.run(put(key, [b"new"]))
        assert type(caught.value) is kind
        assert caught.value.retryable is retryable
        assert caught.value.context["key"] == key
        assert str(backend.root) in str(caught.value)
    assert files_under(backend.root) == ["k"]
    assert asyncio.run(backend.get("k")) == b"old"


def test_a_failed_sync_is_a_failed_put(backend, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(posix, "sync_file", fail)
    with pytest.raises(StorageError):
        asyncio.run(backend.put_if_absent("k", [b"x"]))
    assert files_under(backend.root) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(backend):
    asyncio.run(backend.put("k", [b"x"]))
    (backend.root / ".tmp").chmod(0o500)
    with pytest.raises(AccessDeniedError):
        asyncio.run(backend.put("k", [b"x"]))


def test_a_failing_listing_is_no_empty_listing(backend, monkeypatch):
    asyncio.run(backend.put("a/k", [b"x"]))

    def fail(_):
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(AccessDeniedError):
        asyncio.run(keys_of(backend, ""))


def test_objects_and_folders_cannot_share_a_name(backend):
    asyncio.run(backend.put("a/b", [b"x"]))
    for put, key in ((backend.put, "a"), (backend.put_if_absent, "a"), (backend.put, "a/b/c")):
        with pytest.raises(StorageError, match=r"folder"):
            asyncio.run(put(key, [b"x"]))
    assert files_under(backend.root) == ["a/b"]


def test_a_name_too_long_for_the_file_system(backend):
    with pytest.raises(InvalidInputError, match="255"):
        asyncio.run(backend.put("a/" + "x" * 300, [b"x"]))


def test_the_root_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="no folder"):
        LocalBackend(tmp_path / "file")
    with pytest.raises(ConfigError, match="num_threads"):
        LocalBackend(tmp_path, num_threads=0)


def test_reading_creates_nothing(backend):
    assert asyncio.run(keys_of(backend, "")) == []
    assert asyncio.run(backend.leftovers()) == []
    asyncio.run(backend.delete("a/b"))
    assert not backend.root.exists()


def test_a_dangling_link_is_not_written_through(backend, tmp_path):
    backend.root.mkdir()
    (backend.root / "k").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AlreadyExistsError):
        asyncio.run(backend.put_if_absent("k", [b"x"]))
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_whose_answer_was_lost_counts(backend, monkeypatch):
    link = Path.hardlink_to

    def link_and_complain(path, temp):
        link(path, temp)
        raise FileExistsError(errno.EEXIST, "as NFS says of a link that it carried out twice")

    monkeypatch.setattr(Path, "hardlink_to", link_and_complain)
    asyncio.run(backend.put_if_absent("k", [b"x"]))
    assert files_under(backend.root) == ["k"]


# Temporary files


def test_temporary_files_are_no_objects(backend):
    async def check():
        await backend.put("k", [b"x"])
        await backend.put("a/.tmp/k", [b"x"])
        (backend.root / ".tmp" / "left").write_bytes(b"12345")
        assert await keys_of(backend, "") == ["a/.tmp/k", "k"]
        assert await keys_of(backend, ".tmp/") == []
        assert await keys_of(backend, ".t") == []
        for attempt in (backend.get(".tmp/left"), backend.put(".tmp/left", [b""]), backend.delete(".tmp/left")):
            with pytest.raises(InvalidInputError):
                await attempt

    asyncio.run(check())


@pytest.mark.parametrize(("key", "known"), [("refs/a%20b/1", True), ("x" * 240, False)])
def test_leftovers_tell_their_key_where_it_fits(backend, monkeypatch, key, known):
    monkeypatch.setattr(Path, "unlink", lambda _: None)
    monkeypatch.setattr(backend, "_publish", lambda *_, **__: None)
    asyncio.run(backend.put(key, [b"12345"]))
    monkeypatch.undo()
    (leftover,) = asyncio.run(backend.leftovers())
    assert (leftover.key, leftover.size_bytes) == (key if known else "", 5)
    assert abs(leftover.modified_seconds - time.time()) < 60
    for _ in range(2):
        asyncio.run(backend.remove_leftover(leftover))
    assert asyncio.run(backend.leftovers()) == []


@pytest.mark.parametrize("name", ["../k", "", "..", "a/b"])
def test_only_temporary_files_are_removed_as_such(backend, name):
    asyncio.run(backend.put("k", [b"x"]))
    with pytest.raises(InvalidInputError):
        asyncio.run(backend.remove_leftover(Leftover(name=name, key="", size_bytes=0, modified_seconds=0)))
    assert asyncio.run(backend.get("k")) == b"x"


def test_a_deletion_takes_empty_folders_along(backend):
    asyncio.run(backend.put("txn/1/a", [b"x"]))
    asyncio.run(backend.put("txn/2/a", [b"x"]))
    asyncio.run(backend.delete("txn/1/a"))
    assert sorted(path.name for path in (backend.root / "txn").iterdir()) == ["2"]
    asyncio.run(backend.delete("txn/2/a"))
    assert sorted(path.name for path in backend.root.iterdir()) == [".tmp"]


# Other processes

_WRITER = """
import asyncio, sys
from vescale_storage.backends.local import LocalBackend

async def write():
    backend = LocalBackend(sys.argv[1])
    print("ready", flush=True)
    for number in range(1_000_000):
        await backend.put("same", [bytes([number % 256]) * 300_000, bytes([number % 256]) * 300_000])
        await backend.put_if_absent(f"new/{number}", [bytes([number % 256]) * 100_000])

asyncio.run(write())
"""

_RACER = """
import asyncio, sys
from vescale_storage.backends.local import LocalBackend
from vescale_storage.errors import AlreadyExistsError

async def race():
    backend = LocalBackend(sys.argv[1], durable=False)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(200):
        try:
            await backend.put_if_absent(f"k/{number}", [sys.argv[2].encode()])
        except AlreadyExistsError:
            continue
        print(number, flush=True)

asyncio.run(race())
"""


def start(script, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("delay_seconds", [0.05, 0.15])
def test_a_killed_writer_leaves_whole_objects(backend, delay_seconds):
    writer = start(_WRITER, backend.root)
    time.sleep(delay_seconds)
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=10)

    async def check():
        objects = {info.key: await backend.get(info.key) async for info in backend.list("")}
        assert "same" in objects
        for key, content in objects.items():
            assert len(content) == (600_000 if key == "same" else 100_000)
            assert len(set(content)) == 1
        for leftover in await backend.leftovers():
            await backend.remove_leftover(leftover)
        assert files_under(backend.root) == sorted(objects)

    asyncio.run(check())


def test_processes_race_for_names(backend):
    racers = [start(_RACER, backend.root, name) for name in "abc"]
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = {}
    for name, racer in zip("abc", racers, strict=True):
        output, _ = racer.communicate(timeout=60)
        assert racer.returncode == 0
        for number in output.split():
            assert number not in won
            won[number] = name
    assert len(won) == 200
    for number, name in won.items():
        assert asyncio.run(backend.get(f"k/{number}")) == name.encode()


def test_small_objects_pass_between_the_chunks_of_large_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_CHUNK_BYTES", 64 * 2**10)

    async def check():
        backend = LocalBackend(tmp_path / "store", num_threads=1)
        order = []

        async def put(key, payload):
            await backend.put(key, payload)
            order.append(key)

        large = asyncio.create_task(put("large", [bytes(16 * 2**20)]))
        await asyncio.sleep(0.001)
        await put("small", [b"x"])
        await large
        assert order == ["small", "large"]
        await backend.close()

    asyncio.run(check())
