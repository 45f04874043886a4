"""The fast path against a real server, and against that server behind a proxy that tampers with requests."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
import uuid

import pytest
from aiohttp import web

from tests.storage.s3_proxy import Proxy, cut_answer, error_answer, hang_up, stall_answer
from vescale_storage.backends import open_backend, probe_conditional_put
from vescale_storage.backends.obstore import ObstoreBackend
from vescale_storage.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    NoSpaceError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
)
from vescale_storage.testing import BackendConformance, keys_of, read
from vescale_storage.testing_support import fork_and_wait
from vescale_storage.wrappers.retry import RetryBackend, RetryPolicy

MIB = 2**20
OBSTORE = {"client": "obstore"}
SMALL_PARTS = {"multipart_bytes": 5 * MIB, "part_bytes": 5 * MIB}


class _Conformance(BackendConformance):
    many_keys = 1010
    num_races = 1
    more: dict = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _place(self, s3_url):
        self.place = s3_url

    def make(self):
        return open_backend(self.place.url, self.place.storage_options | OBSTORE | self.more)

    def make_again(self, backend):
        return open_backend(backend.url, self.place.storage_options | OBSTORE)


@pytest.mark.s3
class TestConformance(_Conformance):
    pass


@pytest.mark.s3
class TestConformanceInParts(_Conformance):
    """Large objects in parts, which s3fs sends; the rest as above."""

    more = SMALL_PARTS


# Behind a proxy


@contextlib.asynccontextmanager
async def behind_proxy(place, **options):
    async with Proxy(place.storage_options["endpoint_url"]).serving() as proxy:
        own = {"endpoint_url": proxy.url} | OBSTORE | options
        backend = open_backend(place.url, place.storage_options | own)
        assert type(backend) is ObstoreBackend
        try:
            yield backend, proxy
        finally:
            await backend.close()


def with_proxy(**options):
    """Turn a coroutine ``check(backend, proxy)`` into a test."""

    def decorate(check):
        @pytest.mark.s3
        def test(s3_url):
            async def run():
                async with behind_proxy(s3_url, **options) as (backend, proxy):
                    await check(backend, proxy)

            asyncio.run(asyncio.wait_for(run(), 60))

        test.__name__ = check.__name__
        return test

    return decorate


@with_proxy()
async def test_requests_of_each_verb(backend, proxy):
    await backend.put("k", [b"12", b"345"])
    await backend.put_if_absent("l", [bytes(MIB)] * 11)
    await backend.get("k")
    assert await read(backend, "k", 1, 2) == b"23"
    await backend.head("k")
    await keys_of(backend, "")
    await backend.delete("k")
    assert proxy.seen == [
        "PUT",
        "PUT",
        "GET",
        "GET",
        "HEAD",
        "GET encoding-type,list-type,prefix",
        "DELETE",
    ]


@with_proxy(**SMALL_PARTS)
async def test_larger_objects_go_in_parts_with_a_condition_at_the_end(backend, proxy):
    await backend.put("warm", [b"x"])
    await backend.head("warm")
    proxy.seen.clear()
    await backend.put_if_absent("k", [bytes(11 * MIB)])
    assert sorted(proxy.seen) == ["HEAD", "POST uploadId", "POST uploads", *["PUT partNumber,uploadId"] * 3]
    with pytest.raises(AlreadyExistsError):
        await backend.put_if_absent("k", [bytes(6 * MIB)])


@with_proxy()
async def test_the_server_checks_what_arrives(backend, proxy):
    async def damage(request, forward):
        if request.method == "PUT":
            body = bytearray(await request.read())
            body[-1] ^= 1
            request._read_bytes = bytes(body)
        return await forward(request)

    proxy.tamper = damage
    for num_bytes in (100, 6 * MIB):
        with pytest.raises(StorageError) as caught:
            await backend.put("k", [bytes(num_bytes)])
        assert caught.value.retryable
    proxy.tamper = None
    with pytest.raises(ObjectNotFoundError):
        await backend.head("k")


@with_proxy()
async def test_a_create_whose_answer_was_lost_is_known_again(backend, proxy):
    lost = 0

    async def lose_first(request, forward):
        nonlocal lost
        answer = await forward(request)
        if "If-None-Match" in request.headers and not lost:
            lost += 1
            return hang_up(request)
        return answer

    proxy.tamper = lose_first
    patient = RetryBackend(backend, RetryPolicy(first_delay_seconds=0.01))
    await patient.put_if_absent("k", [b"mi", b"ne"])
    assert lost == 1
    assert await backend.get("k") == b"mine"
    with pytest.raises(AlreadyExistsError):
        await patient.put_if_absent("k", [b"mine"])


@with_proxy()
async def test_a_refused_create_without_an_object_may_be_tried_again(backend, proxy):
    async def refuse(request, forward):
        if request.method == "PUT":
            return error_answer(409, "ConditionalRequestConflict")
        return await forward(request)

    proxy.tamper = refuse
    with pytest.raises(StorageError) as caught:
        await backend.put_if_absent("k", [b"x"])
    assert caught.value.retryable


@pytest.mark.s3
@pytest.mark.parametrize(
    ("status", "code", "kind", "retryable"),
    [
        (403, "AccessDenied", AccessDeniedError, False),
        (400, "ExpiredToken", AccessDeniedError, False),
        (503, "SlowDown", ThrottledError, True),
        (500, "InternalError", StorageError, True),
        (507, "InsufficientStorage", NoSpaceError, False),
        (400, "RequestTimeout", StorageTimeoutError, True),
        (301, "PermanentRedirect", StorageError, False),
        (404, "NoSuchBucket", StorageError, False),
    ],
)
def test_refused_requests(s3_url, status, code, kind, retryable):
    async def check():
        async with behind_proxy(s3_url) as (backend, proxy):
            await backend.put("k", [b"12345"])

            async def refuse(request, forward):
                return error_answer(status, code)

            proxy.tamper = refuse
            for attempt in (
                backend.get("k"),
                read(backend, "k", 0, 2),
                backend.put("k", [b"x"]),
                backend.put_if_absent("k", [b"x"]),
            ):
                proxy.seen.clear()
                with pytest.raises(kind) as caught:
                    await attempt
                assert type(caught.value) is kind
                assert caught.value.retryable is retryable
                assert caught.value.context["key"] == "k"
                assert "Debug source" not in caught.value.message
                assert len(proxy.seen) == 1  # nothing below the retry wrapper tries again

    asyncio.run(check())


@with_proxy()
async def test_broken_connections_and_short_answers(backend, proxy):
    await backend.put("k", [bytes(range(200))])

    async def drop(request, forward):
        return hang_up(request)

    for tamper in (drop, cut_answer):
        proxy.tamper = tamper
        for attempt in (backend.get("k"), read(backend, "k", 10, 100)):
            with pytest.raises(StorageError) as caught:
                await attempt
            assert caught.value.retryable
            assert caught.value.context["key"] == "k"


@with_proxy()
async def test_answers_with_other_bytes_than_asked_for(backend, proxy):
    await backend.put("k", [bytes(range(200))])
    ranges = iter(["bytes 11-110/200", "bytes 10-108/200", "bytes 10-109/100", "nonsense"])

    async def shift(request, forward):
        answer = await forward(request)
        answer.headers["Content-Range"] = next(ranges)
        return answer

    proxy.tamper = shift
    for _ in range(4):
        out = bytearray(b"\xee" * 100)
        with pytest.raises(StorageError):
            await backend.get_into("k", 10, memoryview(out))
        assert out == b"\xee" * 100
    assert next(ranges, None) is None


@with_proxy(config_kwargs={"read_timeout": 0.3})
async def test_a_body_that_stalls_times_out(backend, proxy):
    await backend.put("k", [bytes(200)])
    proxy.tamper = stall_answer
    for attempt in (backend.get("k"), read(backend, "k", 10, 100)):
        began = time.monotonic()
        with pytest.raises(StorageTimeoutError) as caught:
            await attempt
        assert caught.value.retryable
        assert time.monotonic() - began < 10


@with_proxy(config_kwargs={"read_timeout": 0.3})
async def test_a_slow_upload_is_not_taken_for_a_stalled_answer(backend, proxy):
    async def slow(request, forward):
        await asyncio.sleep(0.8)
        return await forward(request)

    proxy.tamper = slow
    await backend.put("k", [b"x"])
    proxy.tamper = None
    assert await backend.get("k") == b"x"


# Buffers


@with_proxy()
async def test_a_cancelled_put_lets_go_of_its_buffers_and_leaves_no_mixture(backend, proxy):
    """The caller goes on to use a buffer that a hanging put was sending."""
    old, first, later = bytes(8 * MIB), b"\x01" * (8 * MIB), b"\x02" * (8 * MIB)
    await backend.put("k", [old])
    buffer = bytearray(first)
    reached = asyncio.Event()

    async def hold(request, forward):
        reached.set()
        await asyncio.sleep(0.5)
        return await forward(request)

    proxy.tamper = hold
    task = asyncio.create_task(backend.put("k", [memoryview(buffer)[: MIB + 1], memoryview(buffer)[MIB + 1 :]]))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    buffer[:] = later
    await asyncio.sleep(0.1)
    buffer.append(0)  # raises BufferError while anything holds a view of it
    proxy.tamper = None
    assert await backend.get("k") in {old, first}


@pytest.mark.s3
def test_a_buffer_used_again_and_again_never_corrupts_an_object(s3_url):
    """As staging does: one buffer, filled anew as soon as the put before it has returned, several under way."""

    async def check():
        backend = open_backend(s3_url.url, s3_url.storage_options | OBSTORE)
        try:

            async def worker(number):
                buffer = bytearray(MIB)
                view = memoryview(buffer)
                for turn in range(6):
                    buffer[:] = bytes([number * 6 + turn]) * MIB
                    put = backend.put if turn % 2 else backend.put_if_absent
                    await put(f"{number}-{turn}", [view[: MIB // 3], view[MIB // 3 :]])

            await asyncio.gather(*(worker(number) for number in range(4)))
            for number in range(4):
                for turn in range(6):
                    assert await backend.get(f"{number}-{turn}") == bytes([number * 6 + turn]) * MIB
        finally:
            await backend.close()

    asyncio.run(check())


@pytest.mark.s3
def test_a_large_payload_is_not_joined(s3_url):
    """Sending 96 MiB costs far less memory than another 96 MiB."""
    code = """
import asyncio, json, sys, threading, time
from vescale_storage.backends import open_backend
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) // 1024
peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.002)
async def main():
    backend = open_backend(sys.argv[1], json.loads(sys.argv[2]))
    await backend.put("warm", [bytes(2**20)])
    await backend.get("warm")
    parts = [bytearray(b"x" * 3 * 2**20) for _ in range(32)]
    threading.Thread(target=watch, daemon=True).start()
    before = resident()
    await backend.put_if_absent("large", parts)
    assert (await backend.head("large")).size_bytes == 96 * 2**20
    print(peak - before)
    await backend.delete("large")
    await backend.close()
asyncio.run(main())
"""
    options = json.dumps(s3_url.storage_options | OBSTORE)
    done = subprocess.run(
        [sys.executable, "-c", code, s3_url.url, options], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32


@pytest.mark.s3
def test_a_child_forked_from_a_process_that_used_it_goes_by_s3fs(s3_url):
    """obstore's threads do not survive a fork: a request there would wait for ever."""
    backend = open_backend(s3_url.url, s3_url.storage_options | OBSTORE)

    async def use(what):
        try:
            await backend.put("k", [what])
            assert await read(backend, "k", 0, len(what)) == what
            return await backend._fast("get", "k") is not None
        finally:
            await backend.close()

    assert asyncio.run(use(b"parent"))

    async def child():
        assert not await use(b"child")

    assert fork_and_wait(child) == 0
    assert asyncio.run(use(b"parent again"))


# Credentials, places, options


@pytest.mark.s3
def test_credentials_come_from_where_s3fs_finds_them(s3_url, monkeypatch, tmp_path):
    """A profile's key is not mixed with the token of another in the environment."""
    options = s3_url.storage_options
    config = tmp_path / "credentials"
    config.write_text(
        f"[mine]\naws_access_key_id = {options['key']}\naws_secret_access_key = {options['secret']}\n"
        f"[wrong]\naws_access_key_id = {options['key']}\naws_secret_access_key = wrong\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(config))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    place = {"endpoint_url": options["endpoint_url"]} | OBSTORE

    async def use(own):
        backend = open_backend(s3_url.url, place | own)
        try:
            await backend.put("k", [b"x"])
            return await backend.get("k")
        finally:
            await backend.close()

    assert asyncio.run(use({"profile": "mine"})) == b"x"
    with pytest.raises(AccessDeniedError, match="SignatureDoesNotMatch"):
        asyncio.run(use({"profile": "wrong"}))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of somebody else")
    assert asyncio.run(use({"key": options["key"], "secret": options["secret"]})) == b"x"
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessDeniedError, match="give credentials by"):
        asyncio.run(use({}))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    assert asyncio.run(use({})) == b"x"


@pytest.mark.s3
def test_places_that_are_not_there(s3_url):
    async def fails(url, options, kind, match):
        backend = open_backend(url, options | OBSTORE)
        try:
            for attempt in (backend.get("k"), read(backend, "k", 0, 1), backend.head("k")):
                with pytest.raises(kind, match=match) as caught:
                    await attempt
                assert type(caught.value) is kind
        finally:
            await backend.close()

    missing = f"s3://missing-{uuid.uuid4().hex}/p"
    asyncio.run(fails(missing, s3_url.storage_options, StorageError, "bucket does not exist"))
    nobody = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}
    asyncio.run(fails("s3://bucket/p", nobody, StorageError, "127.0.0.1:9"))


@pytest.mark.s3
def test_a_server_that_ignores_conditions_is_found(s3_url):
    async def check():
        async with behind_proxy(s3_url) as (backend, proxy):
            await backend.put("warm", [b"x"])
            assert await probe_conditional_put(backend)

            async def ignore(request, forward):
                answer = await forward(request)
                return web.Response(headers={"ETag": '"x"'}) if answer.status == 412 else answer

            proxy.tamper = ignore
            assert not await probe_conditional_put(backend)
        async with behind_proxy(s3_url, conditional_put=False) as (backend, proxy):
            await backend.head("warm")
            proxy.seen.clear()
            await backend.put_if_absent("k", [b"x"])
            with pytest.raises(AlreadyExistsError):
                await backend.put_if_absent("k", [b"y"])
            assert proxy.seen == ["HEAD", "PUT", "HEAD"]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("url", "options", "match"),
    [
        ("s3://b", {"requester_pays": True}, "requester_pays in storage_options: only s3fs"),
        ("s3://b", {"client_kwargs": {"region_name": "x", "config": 1}}, r"client_kwargs\['config'\]"),
        ("s3://b", {"config_kwargs": {"s3": {}}}, r"config_kwargs\['s3'\]"),
        ("s3://arn:aws:s3:us-east-1:123456789012:accesspoint/mine/p", {}, "access points"),
        ("s3://b", {"client": "boto3"}, "known are 's3fs' and 'obstore'"),
    ],
)
def test_what_it_does_not_know_is_refused(url, options, match):
    with pytest.raises(ConfigError, match=match):
        open_backend(url, OBSTORE | options)


def test_certificates_are_passed_on(tmp_path):
    key = {"key": "k", "secret": "s"} | OBSTORE
    backend = open_backend("s3://b", key | {"client_kwargs": {"verify": str(tmp_path / "none")}})
    with pytest.raises(ConfigError, match="certificates"):
        asyncio.run(backend.get("k"))
    backend = open_backend("s3://b", key | {"client_kwargs": {"verify": False, "region_name": "eu-west-1"}})

    async def stores():
        try:
            return await backend._fast("get", "k")
        finally:
            await backend.close()

    made = asyncio.run(stores())
    assert made.reading.client_options["allow_invalid_certificates"]
    assert made.reading.config["region"] == made.writing.config["region"] == "eu-west-1"
    assert made.reading.config["endpoint"] == "https://s3.eu-west-1.amazonaws.com"
    assert "read_timeout" not in made.writing.client_options


def test_without_the_package_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from vescale_storage.backends import open_backend\n"
        "from vescale_storage.errors import ConfigError\n"
        "try: open_backend('s3://b', {'client': 'obstore'})\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'vescale-ckpt[fast]'" in done.stdout
