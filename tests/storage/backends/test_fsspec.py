"""The fsspec back end over file systems of several kinds, one of them with scripted faults."""

import asyncio
import datetime as dt
import threading
import time
import uuid

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from vescale_storage.backends import probe_conditional_put
from vescale_storage.backends.fsspec import FsspecBackend, _modified_seconds, _without_secrets
from vescale_storage.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    ObjectNotFoundError,
    StorageError,
    ThrottledError,
)
from vescale_storage.testing import BackendConformance, keys_of, read


class ScriptedFS(AbstractFileSystem):
    """An object store in memory that fails as told, with the least that fsspec asks for."""

    protocol = "scripted"
    cachable = False

    def __init__(self, **options):
        super().__init__(**options)
        self.objects, self.rules, self.log = {}, [], []

    @classmethod
    def _strip_protocol(cls, path):
        return path.split("://", 1)[-1].strip("/")

    def fail_on(self, operation, error, times=1, match=""):
        self.rules.append([operation, error, times, match])

    def _hit(self, operation, path):
        self.log.append((operation, path))
        for rule in self.rules:
            if rule[0] == operation and rule[3] in path and rule[2] > 0:
                rule[2] -= 1
                raise rule[1]

    def pipe_file(self, path, value, mode="overwrite", **_):
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        time.sleep(0)  # lets another thread in between the look and the write
        self._hit("put", path)
        self.objects[path] = value

    def cat_file(self, path, start=None, end=None, **_):
        self._hit("get", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][slice(start, end)]

    def info(self, path, **_):
        self._hit("info", path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(key.startswith(path + "/") for key in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, **_):
        self._hit("ls", path)
        found = {}
        for key in self.objects:
            if key.startswith(path + "/"):
                name = f"{path}/{key[len(path) + 1 :].split('/')[0]}"
                found[name] = self.info(name)
        if not found:
            raise FileNotFoundError(path)
        return list(found.values())

    def rm_file(self, path):
        self._hit("rm", path)
        self.objects.pop(path)  # a KeyError if there is none, as some file systems do


class TestMemory(BackendConformance):
    def make(self):
        return FsspecBackend(f"memory://{uuid.uuid4().hex}/root")

    def make_again(self, backend):
        return FsspecBackend(backend.url)

    names_may_clash = False


class TestScripted(BackendConformance):
    def make(self):
        return FsspecBackend("scripted://bucket/root", filesystem=ScriptedFS())

    def make_again(self, backend):
        return FsspecBackend(backend.url, filesystem=backend._filesystems.any())

    names_may_clash = False
    test_fork = None  # its objects are this process's alone, and no protocol name tells


class TestAsynchronous(BackendConformance):
    """Native coroutines; this wrapper runs the memory file system on threads behind them."""

    names_may_clash = False

    def make(self):
        filesystem = AsyncFileSystemWrapper(MemoryFileSystem(), asynchronous=True)
        return FsspecBackend(f"memory://{uuid.uuid4().hex}/root", filesystem=filesystem)


class TestFiles(BackendConformance):
    """Folders have to be made, and creates only look first."""

    names_may_clash = False

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.url = f"file://{tmp_path}/root"

    def make(self):
        return FsspecBackend(self.url)

    def make_again(self, backend):
        return FsspecBackend(backend.url)

    # A local file is written in place: what fsspec shows of it half-way is why the back end is meant for object stores.
    test_reads_are_never_torn = None
    test_folders_come_and_go = None


@pytest.mark.s3
class TestS3ThroughFsspec(BackendConformance):
    """The general back end over an asynchronous file system that opens real connections."""

    # The slow ones show nothing here that the S3 back end does not show.
    test_folders_come_and_go = None
    test_keeps_no_reference_to_buffers = None
    test_reads_are_never_torn = None
    test_cancelled_put_is_whole_or_absent = None
    test_list_is_by_string_prefix_in_order = None
    test_bad_keys_are_refused = None

    many_keys = 50
    num_races = 1
    large_bytes = 6 * 2**20

    @pytest.fixture(autouse=True)
    def _place(self, s3_url):
        self.place = s3_url

    def make(self):
        return FsspecBackend(self.place.url, self.place.storage_options)

    def make_again(self, backend):
        return FsspecBackend(backend.url, self.place.storage_options)


@pytest.fixture
def scripted():
    return ScriptedFS()


@pytest.fixture
def backend(scripted):
    return FsspecBackend("scripted://bucket/root", filesystem=scripted)


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (OSError("503 SlowDown"), ThrottledError, True),
        (PermissionError("no"), AccessDeniedError, False),
        (RuntimeError("a client library's own"), StorageError, False),
    ],
)
def test_errors_are_translated_at_every_verb(backend, scripted, error, kind, retryable):
    asyncio.run(backend.put("k", [b"12345"]))
    for operation, attempt in (
        ("put", lambda: backend.put("k", [b"x"])),
        ("put", lambda: backend.put_if_absent("new", [b"x"])),
        ("get", lambda: backend.get("k")),
        ("get", lambda: read(backend, "k", 0, 2)),
        ("info", lambda: backend.head("k")),
        ("ls", lambda: keys_of(backend, "")),
        ("rm", lambda: backend.delete("k")),
    ):
        scripted.fail_on(operation, error)
        with pytest.raises(kind) as caught:
            asyncio.run(attempt())
        assert type(caught.value) is kind
        assert caught.value.retryable is retryable
        assert caught.value.__cause__ is error
    assert asyncio.run(backend.get("k")) == b"12345"


def test_a_folder_that_cannot_be_listed_is_not_left_out(backend, scripted):
    """fsspec's own find() passes over such folders."""
    for key in ("a/1", "b/1", "c/1"):
        asyncio.run(backend.put(key, [b"x"]))
    scripted.fail_on("ls", OSError("500 internal error"), match="root/b")
    with pytest.raises(StorageError) as caught:
        asyncio.run(keys_of(backend, ""))
    assert caught.value.retryable


def test_a_listing_asks_only_for_folders_that_matter(backend, scripted):
    for key in ("refs/run/1", "refs/other/1", "packs/aa/1", "packs/bb/1"):
        asyncio.run(backend.put(key, [b"x"]))
    scripted.log.clear()
    assert asyncio.run(keys_of(backend, "refs/run/")) == ["refs/run/1"]
    assert [path for operation, path in scripted.log if operation == "ls"] == ["bucket/root/refs/run"]


@pytest.mark.parametrize(("cut", "kind"), [(slice(0, -1), StorageError), (slice(0, 0), StorageError)])
def test_short_answers_are_found(backend, scripted, monkeypatch, cut, kind):
    asyncio.run(backend.put("k", [b"0123456789"]))
    cat_file = scripted.cat_file
    monkeypatch.setattr(scripted, "cat_file", lambda *args, **kwargs: cat_file(*args, **kwargs)[cut])
    with pytest.raises(kind) as caught:
        asyncio.run(read(backend, "k", 2, 5))
    assert caught.value.retryable


def test_long_answers_are_found(backend, scripted, monkeypatch):
    asyncio.run(backend.put("k", [b"0123456789"]))
    monkeypatch.setattr(scripted, "cat_file", lambda *_, **__: b"0123456789")
    out = bytearray(5)
    with pytest.raises(StorageError):
        asyncio.run(backend.get_into("k", 2, memoryview(out)))
    assert out == bytes(5)


def test_what_is_kept_by_the_file_system_is_not_the_callers(backend, scripted):
    buffer = bytearray(b"12345")
    asyncio.run(backend.put("k", [buffer]))
    assert scripted.objects["bucket/root/k"] is not buffer
    assert type(scripted.objects["bucket/root/k"]) is bytes


def test_capabilities_follow_the_class(backend):
    assert backend.capabilities.conditional_put
    assert backend.capabilities.shared
    memory = FsspecBackend("memory://x").capabilities
    assert memory.conditional_put
    assert not memory.shared
    assert not memory.durable
    assert not FsspecBackend("file:///tmp/x").capabilities.conditional_put


def test_the_probe(backend):
    assert asyncio.run(probe_conditional_put(backend))
    assert not asyncio.run(probe_conditional_put(FsspecBackend(f"file:///tmp/{uuid.uuid4().hex}")))
    assert asyncio.run(keys_of(backend, "")) == []


def test_threads_race_for_a_name(scripted):
    """Many file systems look and then write; creates of one process do not get between the two."""
    backends = [FsspecBackend("scripted://bucket/root", filesystem=scripted) for _ in range(4)]
    won = []

    def race(number):
        async def run():
            for key in range(50):
                try:
                    await backends[number].put_if_absent(f"k{key}", [b"%d" % number])
                    won.append(key)
                except AlreadyExistsError:
                    pass

        asyncio.run(run())

    racers = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(won) == list(range(50))


# URLs and times


@pytest.mark.parametrize(
    ("url", "match"), [("nonsense://x", "nonsense"), ("gcs://bucket", "gcsfs"), ("sftp://host/x", "paramiko")]
)
def test_unknown_schemes_and_missing_packages(url, match):
    with pytest.raises(ConfigError, match=match):
        FsspecBackend(url)


def test_wrong_options():
    class Strict(MemoryFileSystem):
        protocol = "strict"

        def __init__(self, *, level):
            super().__init__()
            self.level = level

    fsspec.register_implementation("strict", Strict, clobber=True)
    assert FsspecBackend("strict://x", {"level": 3})._filesystems.any().level == 3
    with pytest.raises(ConfigError, match=r"strict://x with these storage_options: .*'levle'"):
        FsspecBackend("strict://x", {"levle": 3})


def test_secrets_in_urls_are_not_shown():
    assert _without_secrets("sftp://user:secret@host:22/a@b") == "sftp://host:22/a@b"
    assert _without_secrets("gs://bucket/a@b") == "gs://bucket/a@b"


@pytest.mark.parametrize(
    ("info", "seconds"),
    [
        ({"mtime": 5}, 5.0),
        ({"mtime": 5.5, "created": 3}, 5.5),
        ({"LastModified": dt.datetime(2020, 1, 1, tzinfo=dt.UTC)}, 1577836800.0),
        ({"updated": "2020-01-01T00:00:00.000Z"}, 1577836800.0),
        ({"mtime": None, "created": 7}, 7.0),
    ],
)
def test_times_under_many_names(info, seconds):
    assert _modified_seconds(info) == seconds


def test_an_unknown_time_is_never_old():
    assert _modified_seconds({"size": 1}) == pytest.approx(time.time(), abs=5)


def test_a_file_system_for_every_loop():
    class Own(AsyncFileSystemWrapper):
        made = 0

        def __init__(self, **options):
            Own.made += 1
            assert options.pop("asynchronous")
            super().__init__(MemoryFileSystem(), asynchronous=True, **options)

    fsspec.register_implementation("own-async", Own, clobber=True)
    backend = FsspecBackend("own-async://bucket")
    Own.made = 0
    for number in range(2):
        for _ in range(2):
            asyncio.run(backend.put(f"k{number}", [b"x"]))
    assert Own.made == 4

    async def twice():
        await backend.get("k0")
        await backend.get("k1")
        with pytest.raises(ObjectNotFoundError):
            await backend.get("k2")

    asyncio.run(twice())
    assert Own.made == 5
    assert len(backend._filesystems._by_loop) == 1
