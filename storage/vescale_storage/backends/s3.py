"""Objects in an S3 bucket, or on a server that speaks its protocol, through s3fs.

A small object is one PUT, a large one a multipart upload whose parts were planned before the first was sent.
Create-only is ``If-None-Match: *``, on the PUT or on the upload's completion. Nothing is renamed, and nothing is listed
from a cache.
"""

from __future__ import annotations

import re
import uuid
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import s3fs

from vescale_storage import loop
from vescale_storage.backend import Backend, Capabilities, Leftover, ObjectInfo, Payload
from vescale_storage.backends import parts, s3_errors
from vescale_storage.backends.checks import check_key, check_prefix, check_range, past_end
from vescale_storage.backends.s3_body import PayloadBody, crc32
from vescale_storage.backends.s3_client import S3Client
from vescale_storage.backends.s3_upload import Upload
from vescale_storage.errors import (
    AlreadyExistsError,
    ConfigError,
    InvalidInputError,
    ObjectNotFoundError,
    StorageError,
    VeScaleError,
)
from vescale_storage.payload import cut_exactly, payload_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

_READ_BYTES: Final = 2**20
_SMALL_BYTES: Final = 256 * 2**10
"""Up to this size a body is joined: one small copy costs less than a streamed body."""
_MULTIPART_BYTES: Final = 64 * 2**20
_NUM_PARALLEL: Final = 4
_PUT_ID: Final = "put-id"
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class S3Backend(Backend):
    """Objects under ``s3://bucket/prefix``.

    Args:
        url: bucket (or access point) and prefix.
        options: what ``s3fs.S3FileSystem`` takes: ``key``, ``secret``, ``token``, ``profile``, ``endpoint_url``,
            ``client_kwargs``, ``config_kwargs``, ``s3_additional_kwargs``, ...
        multipart_bytes: an object larger than this is uploaded in parts.
        part_bytes: size of a part, unless the object needs larger ones.
        num_parallel: parts of one object that are sent at a time.
        conditional_put: False for a server that ignores ``If-None-Match`` (see ``probe``): a create-only put then looks
            first and puts afterwards, which is safe only while there is one writer.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        multipart_bytes: int = _MULTIPART_BYTES,
        part_bytes: int = parts.PREFERRED_PART_BYTES,
        num_parallel: int = _NUM_PARALLEL,
        conditional_put: bool = True,
    ) -> None:
        bucket, self._root = _split(url)
        self.url = f"s3://{bucket}/{self._root}".rstrip("/")
        if multipart_bytes < parts.MIN_PART_BYTES or num_parallel < 1:
            raise ConfigError(
                f"cannot open {self.url} with multipart_bytes={multipart_bytes}, num_parallel={num_parallel}: "
                f"at least {parts.MIN_PART_BYTES} and 1 are needed"
            )
        parts.plan_parts(0, preferred_bytes=part_bytes)
        self.capabilities = Capabilities(
            conditional_put=conditional_put,
            durable=True,
            shared=True,
            max_object_bytes=parts.MAX_OBJECT_BYTES,
            put_concurrency=4,
            get_concurrency=32,
        )
        self._multipart_bytes = multipart_bytes
        self._part_bytes = part_bytes
        self._num_parallel = num_parallel
        self._client = S3Client(self.url, bucket, options or {})

    async def put(self, key: str, payload: Payload) -> None:
        """Write with one PUT or one multipart upload."""
        full_key = self._full_key(key)
        with self._client.translated("put", key):
            await self._send(key, full_key, payload, {}, {})

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Write with ``If-None-Match: *``.

        The object carries an id of this call. The HTTP library sends a PUT again when an idle connection breaks under
        it; if the first was carried out and its answer lost, the second is refused, and the id shows whose it was.
        """
        full_key = self._full_key(key)
        is_large = payload_bytes(payload) > self._multipart_bytes
        if is_large or not self.capabilities.conditional_put:
            # Before many parts are sent in vain; the condition on the last request still decides.
            await self._refuse_taken(key)
        condition = {"IfNoneMatch": "*"} if self.capabilities.conditional_put else {}
        put_id = uuid.uuid4().hex
        try:
            await self._send(key, full_key, payload, {"Metadata": {_PUT_ID: put_id}}, condition)
        except VeScaleError:
            raise
        except s3_errors.TRANSLATED as error:
            if not s3_errors.is_taken(error):
                raise s3_errors.translate(error, "put", key, url=self.url) from error
            await self._settle_conflict(key, put_id, error)

    async def get(self, key: str) -> bytes:
        """Return the whole object with one GET."""
        answer = await self._client.call("get_object", "get", key, Key=self._full_key(key))
        with self._client.translated("get", key):
            async with answer["Body"] as body:
                content: bytes = await body.read()
        if len(content) != answer["ContentLength"]:
            raise self._short(key, len(content), answer["ContentLength"])
        return content

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with one ranged GET."""
        check_range(key, offset, url=self.url)
        full_key = self._full_key(key)
        if not len(out):
            await self._check_within(key, offset, 0)
            return
        wanted = f"bytes={offset}-{offset + len(out) - 1}"
        try:
            answer = await self._client.call_raw("get_object", Key=full_key, Range=wanted)
        except s3_errors.TRANSLATED as error:
            if s3_errors.is_past_end(error):
                await self._check_within(key, offset, len(out))
            raise s3_errors.translate(error, "get", key, url=self.url) from error
        with self._client.translated("get", key):
            async with answer["Body"] as body:
                self._check_answer(key, offset, out, answer)
                await self._fill(key, body, out)

    async def head(self, key: str) -> ObjectInfo:
        """Return size and time with one HEAD."""
        found = await self._head(key)
        return ObjectInfo(
            key=key, size_bytes=found["ContentLength"], modified_seconds=found["LastModified"].timestamp()
        )

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield all pages, sorted here: some servers (SeaweedFS) sort folder by folder, not by whole keys."""
        check_prefix(prefix, url=self.url)
        for info in sorted([info async for info in self._pages(prefix)], key=attrgetter("key")):
            yield info

    async def delete(self, key: str) -> None:
        """Remove with one DELETE, which S3 answers alike whether there was an object or not."""
        full_key = self._full_key(key)
        try:
            await self._client.call("delete_object", "delete", key, Key=full_key)
        except ObjectNotFoundError:
            return

    async def leftovers(self) -> Sequence[Leftover]:
        """Return the multipart uploads that were neither completed nor aborted, also those still under way."""
        found: Sequence[Leftover] = []
        more: dict[str, str] = {}
        while True:
            page = await self._client.call("list_multipart_uploads", "list", "", Prefix=self._root, **more)
            found = [*found, *[await self._leftover(upload) for upload in page.get("Uploads", ())]]
            if not page.get("IsTruncated"):
                return found
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    async def remove_leftover(self, leftover: Leftover) -> None:
        """Abort the upload, which frees its parts."""
        try:
            await self._client.call_raw(
                "abort_multipart_upload", Key=self._full_key(leftover.key), UploadId=leftover.name
            )
        except s3_errors.TRANSLATED as error:
            if not s3_errors.is_absent_upload(error):
                raise s3_errors.translate(error, "abort", leftover.key, url=self.url) from error

    async def close(self) -> None:
        """Close this loop's connections."""
        await self._client.close()

    def _full_key(self, key: str) -> str:
        check_key(key, url=self.url)
        return self._root + key

    # Put

    async def _send(
        self, key: str, full_key: str, payload: Payload, arguments: Mapping[str, Any], condition: Mapping[str, Any]
    ) -> None:
        num_bytes = payload_bytes(payload)
        part_bytes = self._plan(key, num_bytes)
        checksums = await self._client.sends_checksums()
        if num_bytes > self._multipart_bytes:
            upload = Upload(
                client=self._client,
                key=key,
                full_key=full_key,
                part_bytes=part_bytes,
                num_parallel=self._num_parallel,
                checksums=checksums,
                arguments=arguments,
                condition=condition,
            )
            await upload.send(payload)
            return
        views = next(cut_exactly(payload, num_bytes), [])
        checksum = {"ChecksumCRC32": await loop.run_blocking(crc32, views)} if checksums else {}
        body = b"".join(views) if num_bytes <= _SMALL_BYTES else PayloadBody(views)
        await self._client.call_raw("put_object", Key=full_key, Body=body, **checksum, **arguments, **condition)

    def _plan(self, key: str, num_bytes: int) -> int:
        try:
            return parts.plan_parts(num_bytes, preferred_bytes=self._part_bytes)
        except InvalidInputError as error:
            raise InvalidInputError(f"cannot put {key!r} in {self.url}: {error.message}", key=key) from error

    async def _refuse_taken(self, key: str) -> None:
        try:
            await self._head(key)
        except ObjectNotFoundError:
            return
        raise self._taken(key)

    async def _settle_conflict(self, key: str, put_id: str, error: BaseException) -> None:
        """Return if the object in the way is this call's own; raise if it is another's."""
        try:
            found = await self._head(key)
        except ObjectNotFoundError:
            raise StorageError(
                f"cannot create {key!r} in {self.url}: another put was under way, but has left no object; try again",
                retryable=True,
                key=key,
            ) from error
        if found["Metadata"].get(_PUT_ID) != put_id:
            raise self._taken(key) from error

    def _taken(self, key: str) -> AlreadyExistsError:
        return AlreadyExistsError(f"cannot create {key!r} in {self.url}: an object is there", key=key)

    # Get and list

    async def _head(self, key: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = await self._client.call("head_object", "head", key, Key=self._full_key(key))
        return found

    async def _check_within(self, key: str, offset: int, length: int) -> None:
        size_bytes = (await self._head(key))["ContentLength"]
        if offset + length > size_bytes:
            raise past_end(key, offset, length, size_bytes, url=self.url)

    def _check_answer(self, key: str, offset: int, out: memoryview, answer: Mapping[str, Any]) -> None:
        """Refuse an answer that holds other bytes than those asked for."""
        match = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
        if match is None:
            raise StorageError(
                f"cannot get bytes {offset}..{offset + len(out)} of {key!r} in {self.url}: the answer names no range",
                key=key,
            )
        first, last, size_bytes = map(int, match.groups())
        if offset + len(out) > size_bytes:
            raise past_end(key, offset, len(out), size_bytes, url=self.url)
        if first != offset or last != offset + len(out) - 1:
            raise StorageError(
                f"cannot get bytes {offset}..{offset + len(out)} of {key!r} in {self.url}: "
                f"the answer has bytes {first}..{last + 1}",
                retryable=True,
                key=key,
            )

    async def _fill(self, key: str, body: Any, out: memoryview) -> None:
        done = 0
        while done < len(out):
            chunk = await body.read(min(_READ_BYTES, len(out) - done))
            if not chunk:
                raise self._short(key, done, len(out))
            out[done : done + len(chunk)] = chunk
            done += len(chunk)

    def _short(self, key: str, found_bytes: int, wanted_bytes: int) -> StorageError:
        return StorageError(
            f"cannot get {key!r} in {self.url}: the answer ended after {found_bytes} of {wanted_bytes} bytes",
            retryable=True,
            key=key,
        )

    async def _pages(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        more: dict[str, str] = {}
        while True:
            page = await self._client.call("list_objects_v2", "list", prefix, Prefix=self._root + prefix, **more)
            for found in page.get("Contents", ()):
                key = found["Key"].removeprefix(self._root)
                # An empty object with a slash at its end is what consoles make to show a folder.
                if key and not key.endswith("/"):
                    modified_seconds = found["LastModified"].timestamp()
                    yield ObjectInfo(key=key, size_bytes=found["Size"], modified_seconds=modified_seconds)
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _leftover(self, upload: Mapping[str, Any]) -> Leftover:
        return Leftover(
            name=upload["UploadId"],
            key=upload["Key"].removeprefix(self._root),
            size_bytes=await self._uploaded_bytes(upload["Key"], upload["UploadId"]),
            modified_seconds=upload["Initiated"].timestamp(),
        )

    async def _uploaded_bytes(self, full_key: str, upload_id: str) -> int:
        num_bytes = 0
        more: dict[str, int] = {}
        while True:
            try:
                page = await self._client.call_raw("list_parts", Key=full_key, UploadId=upload_id, **more)
            except s3_errors.TRANSLATED as error:
                if s3_errors.is_absent_upload(error):
                    return num_bytes  # completed or aborted since it was listed
                raise s3_errors.translate(error, "list", full_key, url=self.url) from error
            num_bytes += sum(int(part["Size"]) for part in page.get("Parts", ()))
            if not page.get("IsTruncated"):
                return num_bytes
            more = {"PartNumberMarker": page["NextPartNumberMarker"]}


def _split(url: str) -> tuple[str, str]:
    """Return bucket and root, the latter empty or with a slash at its end."""
    splitter = s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True)
    bucket, root, _ = splitter.split_path(url)
    root = root.strip("/")
    if not bucket or url.partition("://")[2].startswith("/"):
        raise ConfigError(f"cannot open {url!r}: it names no bucket; pass s3://bucket/prefix")
    return bucket, root + "/" if root else ""
