"""Multipart uploads against a scripted client; test_s3.py has them against a server."""

import asyncio
import logging

import pytest

from vescale_storage.backends import s3_upload
from vescale_storage.backends.s3_body import crc32
from vescale_storage.backends.s3_upload import Upload
from vescale_storage.errors import AccessDeniedError, StorageError, ThrottledError


class FakeClient:
    """Keeps uploads in memory; ``script`` may raise before a request is carried out."""

    url = "s3://bucket"

    def __init__(self, script=None, *, echoes=True):
        self.script = script or (lambda *_: None)
        self.echoes = echoes
        self.calls = []
        self.parts = {}
        self.in_flight = self.most_in_flight = 0
        self.completed = None

    async def call(self, method, *_, **arguments):
        return await self.call_raw(method, **arguments)

    async def call_raw(self, method, /, **arguments):
        self.calls.append((method, arguments.get("PartNumber")))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            self.script(method, arguments)
            return await getattr(self, method)(**arguments)
        finally:
            self.in_flight -= 1

    async def create_multipart_upload(self, **arguments):
        self.created = arguments
        return {"UploadId": "id"}

    async def upload_part(self, **arguments):
        number = arguments["PartNumber"]
        self.parts[number] = b"".join([bytes(view) async for view in arguments["Body"]])
        checksum = {name: value for name, value in arguments.items() if name == "ChecksumCRC32"}
        assert checksum in ({}, {"ChecksumCRC32": crc32([memoryview(self.parts[number])])})
        return {"ETag": f"tag-{number}"} | (checksum if self.echoes else {})

    async def complete_multipart_upload(self, **arguments):
        self.completed = arguments

    async def abort_multipart_upload(self, **_):
        self.parts = None

    def count(self, method):
        return sum(called == method for called, _ in self.calls)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(s3_upload, "_FIRST_DELAY_SECONDS", 0)


def send(client, payload, **changes):
    settings = {
        "client": client,
        "key": "k",
        "full_key": "root/k",
        "part_bytes": 10,
        "num_parallel": 3,
        "checksums": True,
        "arguments": {"Metadata": {"a": "b"}},
        "condition": {"IfNoneMatch": "*"},
    }
    asyncio.run(Upload(**settings | changes).send(payload))


@pytest.mark.parametrize("num_bytes", [1, 9, 10, 11, 30, 95])
def test_parts_are_cut_and_completed_in_order(num_bytes):
    content = bytes(range(num_bytes))
    client = FakeClient()
    send(client, [content[:3], b"", content[3:]])
    numbers = list(range(1, -(-num_bytes // 10) + 1))
    assert [len(client.parts[number]) for number in numbers[:-1]] == [10] * (len(numbers) - 1)
    assert b"".join(client.parts[number] for number in numbers) == content
    done = client.completed["MultipartUpload"]["Parts"]
    assert [part["PartNumber"] for part in done] == numbers
    assert [part["ETag"] for part in done] == [f"tag-{number}" for number in numbers]
    assert client.completed["IfNoneMatch"] == "*"
    assert client.created["Metadata"] == {"a": "b"}


@pytest.mark.parametrize(
    ("checksums", "echoes", "named"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_checksums_are_named_only_to_servers_that_know_them(checksums, echoes, named):
    client = FakeClient(echoes=echoes)
    send(client, [bytes(25)], checksums=checksums)
    assert ("ChecksumAlgorithm" in client.created) is checksums
    assert all(("ChecksumCRC32" in part) is named for part in client.completed["MultipartUpload"]["Parts"])


@pytest.mark.parametrize("num_parallel", [1, 2, 5])
def test_few_parts_are_on_their_way_at_a_time(num_parallel):
    client = FakeClient()
    send(client, [bytes(200)], num_parallel=num_parallel)
    assert client.most_in_flight == num_parallel


def test_a_part_is_tried_again_alone():
    failures = iter([True, True])

    def script(method, arguments):
        if arguments.get("PartNumber") == 2 and next(failures, False):
            raise ThrottledError("slow down", retryable=True)

    client = FakeClient(script)
    content = bytes(range(35))
    send(client, [content])
    assert b"".join(client.parts[number] for number in (1, 2, 3, 4)) == content
    assert client.count("upload_part") == 6
    assert client.count("create_multipart_upload") == 1
    assert client.count("abort_multipart_upload") == 0


@pytest.mark.parametrize(
    ("error", "num_attempts"), [(ThrottledError("busy", retryable=True), 5), (AccessDeniedError("expired"), 1)]
)
def test_a_part_that_fails_for_good_ends_the_upload(error, num_attempts):
    def script(method, arguments):
        if arguments.get("PartNumber") == 2:
            raise error

    client = FakeClient(script)
    with pytest.raises(type(error)) as caught:
        send(client, [bytes(10_000)])
    assert caught.value is error
    assert client.calls.count(("upload_part", 2)) == num_attempts
    assert client.completed is None
    assert client.calls[-1][0] == "abort_multipart_upload"  # and no part after it
    assert client.count("upload_part") < 100


def test_a_refused_completion_aborts():
    def script(method, arguments):
        if method == "complete_multipart_upload":
            raise StorageError("refused")

    client = FakeClient(script)
    with pytest.raises(StorageError, match="refused"):
        send(client, [bytes(25)])
    assert client.parts is None


@pytest.mark.parametrize("failure", [StorageError("gone"), TimeoutError(), ValueError("odd")])
def test_an_abort_that_fails_does_not_hide_why(failure, caplog):
    def script(method, arguments):
        if method == "upload_part":
            raise AccessDeniedError("expired")
        if method == "abort_multipart_upload":
            raise failure

    with caplog.at_level(logging.WARNING), pytest.raises(AccessDeniedError, match="expired"):
        send(FakeClient(script), [bytes(25)])
    assert "could not be aborted" in caplog.text


def test_an_upload_that_was_never_created_is_not_aborted():
    def script(method, arguments):
        raise StorageError("no")

    client = FakeClient(script)
    with pytest.raises(StorageError):
        send(client, [bytes(25)])
    assert client.calls == [("create_multipart_upload", None)]


def test_cancellation_aborts():
    async def check():
        started = asyncio.Event()

        def script(method, arguments):
            if method == "upload_part":
                started.set()

        client = FakeClient(script)
        upload = Upload(
            client=client,
            key="k",
            full_key="k",
            part_bytes=10,
            num_parallel=2,
            checksums=False,
            arguments={},
            condition={},
        )
        task = asyncio.create_task(upload.send([bytes(1000)]))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.calls[-1][0] == "abort_multipart_upload"
        assert client.in_flight == 0

    asyncio.run(check())
