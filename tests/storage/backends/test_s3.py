"""The S3 back end against a real server, and against that server behind a proxy that tampers with requests."""

import asyncio
import contextlib
import logging
import uuid

import pytest
from aiohttp import web

from tests.storage.s3_proxy import Proxy, cut_answer, error_answer, hang_up
from vescale_storage.backends import open_backend, probe_conditional_put
from vescale_storage.backends.s3 import S3Backend
from vescale_storage.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
)
from vescale_storage.testing import BackendConformance, keys_of, read

MIB = 2**20
SMALL_PARTS = {"multipart_bytes": 5 * MIB, "part_bytes": 5 * MIB}
pytestmark = pytest.mark.s3


class TestConformance(BackendConformance):
    many_keys = 1010
    num_races = 1

    @pytest.fixture(autouse=True)
    def _place(self, s3_url):
        self.place = s3_url

    def make(self):
        return open_backend(self.place.url, self.place.storage_options | SMALL_PARTS)

    def make_again(self, backend):
        return open_backend(backend.url, self.place.storage_options)


# Behind a proxy that tampers


@contextlib.asynccontextmanager
async def behind_proxy(place, **options):
    """Yield a back end and the proxy it goes through."""
    async with Proxy(place.storage_options["endpoint_url"]).serving() as proxy:
        backend = open_backend(place.url, place.storage_options | {"endpoint_url": proxy.url} | SMALL_PARTS | options)
        try:
            yield backend, proxy
        finally:
            await backend.close()


def with_proxy(**options):
    """Turn a coroutine ``check(backend, proxy)`` into a test."""

    def decorate(check):
        def test(s3_url, caplog):
            async def run():
                with caplog.at_level(logging.WARNING):
                    async with behind_proxy(s3_url, **options) as (backend, proxy):
                        await check(backend, proxy)

            asyncio.run(run())

        test.__name__ = check.__name__
        return test

    return decorate


@with_proxy()
async def test_requests_of_each_verb(backend, proxy):
    await backend.put("k", [b"12345"])
    await backend.put_if_absent("l", [b"1"])
    await backend.get("k")
    await read(backend, "k", 1, 2)
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


@with_proxy()
async def test_large_objects_go_in_parts(backend, proxy):
    content = bytes(range(256)) * (11 * MIB // 256)
    await backend.put("k", [content[: 7 * MIB], content[7 * MIB :]])
    assert sorted(proxy.seen) == ["POST uploadId", "POST uploads", *["PUT partNumber,uploadId"] * 3]
    assert await backend.get("k") == content


@with_proxy()
async def test_an_existing_large_object_is_not_sent_again(backend, proxy):
    await backend.put_if_absent("k", [bytes(6 * MIB)])
    proxy.seen.clear()
    with pytest.raises(AlreadyExistsError):
        await backend.put_if_absent("k", [bytes(6 * MIB)])
    assert proxy.seen == ["HEAD"]


@with_proxy()
async def test_the_server_can_check_what_arrives(backend, proxy):
    async def damage(request, forward):
        if request.method == "PUT":
            body = bytearray(await request.read())
            body[-1] ^= 1
            request._read_bytes = bytes(body)
        return await forward(request)

    proxy.tamper = damage
    for num_bytes in (100, MIB, 6 * MIB):
        with pytest.raises(StorageError) as caught:
            await backend.put("k", [bytes(num_bytes)])
        assert caught.value.retryable
    proxy.tamper = None
    with pytest.raises(ObjectNotFoundError):
        await backend.head("k")


@with_proxy()
async def test_a_create_whose_answer_was_lost_is_known_again(backend, proxy):
    """The HTTP library repeats a PUT on a fresh connection when the old one breaks; the repetition is refused."""
    await backend.put("warm", [b"x"])
    lost = 0

    async def lose_first(request, forward):
        nonlocal lost
        answer = await forward(request)
        if "If-None-Match" in request.headers and not lost:
            lost += 1
            return hang_up(request)
        return answer

    proxy.tamper = lose_first
    await backend.put_if_absent("k", [b"mine"])
    assert lost == 1
    assert await backend.get("k") == b"mine"
    with pytest.raises(AlreadyExistsError):
        await backend.put_if_absent("k", [b"mine"])


@pytest.mark.parametrize("code", ["PreconditionFailed", "ConditionalRequestConflict"])
def test_a_refused_create_without_an_object_may_be_tried_again(s3_url, code):
    """S3 answers 409 while another conditional put is under way, which may still come to nothing."""

    async def check():
        async with behind_proxy(s3_url) as (backend, proxy):

            async def refuse(request, forward):
                if request.method == "PUT":
                    return error_answer(409 if code.startswith("Cond") else 412, code)
                return await forward(request)

            proxy.tamper = refuse
            with pytest.raises(StorageError) as caught:
                await backend.put_if_absent("k", [b"x"])
            assert caught.value.retryable
            proxy.tamper = None
            await backend.put("k", [b"other"])
            proxy.tamper = refuse
            with pytest.raises(AlreadyExistsError):
                await backend.put_if_absent("k", [b"x"])

    asyncio.run(check())


@pytest.mark.parametrize(
    ("status", "code", "kind", "retryable"),
    [
        (403, "AccessDenied", AccessDeniedError, False),
        (400, "ExpiredToken", AccessDeniedError, False),
        (503, "SlowDown", ThrottledError, True),
        (500, "InternalError", StorageError, True),
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
                backend.put("k", [bytes(6 * MIB)]),
                backend.delete("k"),
                keys_of(backend, ""),
                backend.leftovers(),
            ):
                proxy.seen.clear()
                with pytest.raises(kind) as caught:
                    await attempt
                assert type(caught.value) is kind
                assert caught.value.retryable is retryable
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
    for kind, retryable in ((StorageError, True), (StorageError, True), (CorruptionError, None), (StorageError, False)):
        out = bytearray(b"\xee" * 100)
        with pytest.raises(kind) as caught:
            await backend.get_into("k", 10, memoryview(out))
        assert getattr(caught.value, "retryable", None) is retryable
        assert out == b"\xee" * 100


@with_proxy(config_kwargs={"read_timeout": 0.3})
async def test_a_silent_server(backend, proxy):
    async def sleep(request, forward):
        await asyncio.sleep(0.6)
        return await forward(request)

    proxy.tamper = sleep
    with pytest.raises(StorageTimeoutError) as caught:
        await backend.put("k", [b"x"])
    assert caught.value.retryable


# Uploads that go wrong


def on_part(number, answer):
    """Answer every attempt at this part in the server's place."""

    async def tamper(request, forward):
        if request.query.get("partNumber") == str(number):
            return answer(request)
        return await forward(request)

    return tamper


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda _: error_answer(403, "AccessDenied"), AccessDeniedError),
        (lambda _: error_answer(400, "InvalidPart"), StorageError),
    ],
)
def test_a_part_that_fails_for_good_aborts_the_upload(s3_url, answer, kind):
    async def check():
        async with behind_proxy(s3_url, num_parallel=2) as (backend, proxy):
            await backend.put("old", [b"old"])
            proxy.tamper = on_part(3, answer)
            for put, key in ((backend.put, "old"), (backend.put_if_absent, "new")):
                with pytest.raises(kind):
                    await put(key, [bytes(21 * MIB)])
                assert "DELETE uploadId" in proxy.seen
            assert await backend.leftovers() == []
            assert await backend.get("old") == b"old"
            with pytest.raises(ObjectNotFoundError):
                await backend.head("new")

    asyncio.run(check())


@with_proxy()
async def test_a_part_that_fails_once_is_sent_again(backend, proxy):
    content = bytes(range(256)) * (11 * MIB // 256)
    failed = set()

    async def fail_once(request, forward):
        number = request.query.get("partNumber")
        if number and number not in failed:
            failed.add(number)
            return error_answer(503, "SlowDown") if number == "1" else hang_up(request)
        return await forward(request)

    proxy.tamper = fail_once
    await backend.put_if_absent("k", [content])
    assert failed == {"1", "2", "3"}
    assert await backend.get("k") == content
    assert proxy.seen.count("POST uploads") == 1


def test_credentials_that_expire_leave_a_trace(s3_url, caplog):
    """Neither the part nor the abort is allowed any more: the save fails, and what stays is listed and removable."""

    async def check():
        async with behind_proxy(s3_url, num_parallel=1) as (backend, proxy):
            expired = False

            async def expire(request, forward):
                nonlocal expired
                expired = expired or request.query.get("partNumber") == "2"
                return error_answer(400, "ExpiredToken") if expired else await forward(request)

            proxy.tamper = expire
            with pytest.raises(AccessDeniedError, match="ExpiredToken"):
                await backend.put_if_absent("some/key", [bytes(11 * MIB)])
            assert "could not be aborted" in caplog.text
            proxy.tamper = None
            (leftover,) = await backend.leftovers()
            assert (leftover.key, leftover.size_bytes) == ("some/key", 5 * MIB)
            assert await keys_of(backend, "") == []
            for _ in range(2):
                await backend.remove_leftover(leftover)
            assert await backend.leftovers() == []

    asyncio.run(check())


@with_proxy(num_parallel=2)
async def test_a_cancelled_upload_is_aborted(backend, proxy):
    reached = asyncio.Event()

    async def hold(request, forward):
        if request.query.get("partNumber") == "2":
            reached.set()
            await asyncio.sleep(1)
        return await forward(request)

    proxy.tamper = hold
    put = asyncio.create_task(backend.put("k", [bytes(11 * MIB)]))
    await reached.wait()
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert "DELETE uploadId" in proxy.seen
    assert await backend.leftovers() == []


@with_proxy()
async def test_a_completion_refused_by_its_condition_aborts(backend, proxy):
    async def put_first(request, forward):
        if request.method == "POST" and "uploadId" in request.query:
            proxy.tamper = None
            await backend.put("k", [b"came first"])
        return await forward(request)

    proxy.tamper = put_first
    with pytest.raises(AlreadyExistsError):
        await backend.put_if_absent("k", [bytes(6 * MIB)])
    assert await backend.get("k") == b"came first"
    assert await backend.leftovers() == []


@with_proxy()
async def test_an_object_too_large_is_refused_before_anything_is_sent(backend, proxy):
    part = memoryview(bytes(MIB))

    class Huge(list):
        """Six tebibytes of payload, as far as its length tells."""

        def __iter__(self):
            return iter([part] * (6 * MIB))

    with pytest.raises(InvalidInputError, match=r"cannot put 'k'"):
        await backend.put("k", Huge())
    assert proxy.seen == []


# Conditions that are ignored


@with_proxy()
async def test_the_probe_finds_a_server_that_ignores_conditions(backend, proxy):
    assert await probe_conditional_put(backend)

    async def ignore(request, forward):
        answer = await forward(request)
        if answer.status == 412:
            key = request.path.split("/", 2)[2]
            await direct._client.call_raw("put_object", Key=key, Body=await request.read())
            return web.Response(headers={"ETag": '"x"'})
        return answer

    direct = S3Backend(backend.url, backend._client._options | {"endpoint_url": proxy.target})
    proxy.tamper = ignore
    assert not await probe_conditional_put(backend)
    await direct.close()
    proxy.tamper = None
    assert await keys_of(backend, "probe/") == []


@with_proxy(conditional_put=False)
async def test_without_conditions_a_create_looks_first(backend, proxy):
    assert not backend.capabilities.conditional_put
    assert not await probe_conditional_put(backend)
    await backend.put("warm", [b"x"])
    await backend.put_if_absent("k", [b"x"])
    with pytest.raises(AlreadyExistsError):
        await backend.put_if_absent("k", [b"y"])
    assert proxy.seen == ["PUT", "HEAD", "PUT", "HEAD"]


# Places, credentials, options


def attempts(backend):
    return (backend.get("k"), backend.head("k"), read(backend, "k", 0, 0), keys_of(backend, ""))


def expect_all(url, options, kind, match):
    async def check():
        backend = open_backend(url, options)
        try:
            for attempt in attempts(backend):
                with pytest.raises(kind, match=match) as caught:
                    await attempt
                assert type(caught.value) is kind
        finally:
            await backend.close()

    asyncio.run(asyncio.wait_for(check(), 30))


def test_a_missing_bucket(s3_url):
    expect_all(f"s3://missing-{uuid.uuid4().hex}/p", s3_url.storage_options, StorageError, "bucket does not exist")


def test_wrong_secrets(s3_url):
    expect_all(s3_url.url, s3_url.storage_options | {"secret": "wrong"}, AccessDeniedError, "credentials")


def test_missing_credentials(s3_url, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    options = {"endpoint_url": s3_url.storage_options["endpoint_url"]}
    expect_all(s3_url.url, options, AccessDeniedError, "give credentials by")


def test_a_server_that_is_not_there():
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}
    expect_all("s3://bucket/p", options, StorageError, "127.0.0.1:9")


@pytest.mark.parametrize(
    "options", [{"nonsense": 1}, {"client_kwargs": {"nonsense": 1}}, {"key": "a", "username": "b"}]
)
def test_impossible_options(options):
    expect_all("s3://bucket/p", options, ConfigError, "storage_options")


@pytest.mark.parametrize(
    ("url", "options", "match"),
    [
        ("s3://", {}, "bucket"),
        ("s3:///p", {}, "bucket"),
        ("s3://b/p", {"multipart_bytes": 1}, "multipart_bytes=1"),
        ("s3://b/p", {"num_parallel": 0}, "num_parallel=0"),
        ("s3://b/p", {"part_bytes": 1}, "parts of 1 bytes"),
    ],
)
def test_places_and_limits_are_checked_at_once(url, options, match):
    with pytest.raises(InvalidInputError, match=match):
        S3Backend(url, **options)


def test_urls_hide_nothing_and_show_no_secret():
    backend = S3Backend("s3://bucket/a/b/", {"key": "KEY", "secret": "SECRET"})
    assert backend.url == "s3://bucket/a/b"
    assert S3Backend("s3://bucket").url == "s3://bucket"


def test_prefixes_keep_stores_apart(s3_url):
    async def check():
        one = open_backend(s3_url.url + "/a", s3_url.storage_options)
        other = open_backend(s3_url.url + "/ab", s3_url.storage_options)
        try:
            await one.put("k", [b"one"])
            await other.put("k", [b"other"])
            assert (await one.get("k"), await other.get("k")) == (b"one", b"other")
            assert await keys_of(one, "") == ["k"]
            await one._client.call_raw("create_multipart_upload", Key=f"{one._root}left/over")
            assert await other.leftovers() == []
            (leftover,) = await one.leftovers()
            await one.remove_leftover(leftover)
        finally:
            await one.close()
            await other.close()

    asyncio.run(check())


def test_folder_markers_are_no_objects(s3_url):
    async def check():
        backend = open_backend(s3_url.url, s3_url.storage_options)
        try:
            await backend._client.call_raw("put_object", Key=f"{backend._root}refs/", Body=b"")
            await backend.put("refs/a", [b"x"])
            assert await keys_of(backend, "") == ["refs/a"]
        finally:
            await backend.close()

    asyncio.run(check())
