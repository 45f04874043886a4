"""One multipart upload: parts in parallel, each tried again by itself, completed in one step or aborted."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vescale_storage import loop
from vescale_storage.backends.s3_body import PayloadBody, crc32
from vescale_storage.errors import StorageError
from vescale_storage.payload import cut_exactly

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vescale_storage.backend import Payload
    from vescale_storage.backends.s3_client import S3Client

logger = logging.getLogger(__name__)

_MAX_PART_ATTEMPTS: Final = 5
"""Parts have retries of their own: the wrapper's would send the whole object again for one lost part."""
_FIRST_DELAY_SECONDS: Final = 0.2
_ABORT_SECONDS: Final = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """Everything about an upload but its bytes.

    ``send`` may be called several times; each call is an upload of its own.
    """

    client: S3Client
    key: str
    """As the caller knows it, for messages."""
    full_key: str
    """As the bucket knows it."""
    part_bytes: int
    num_parallel: int
    checksums: bool
    arguments: Mapping[str, Any]
    """For the object as a whole, such as ``Metadata``."""
    condition: Mapping[str, Any]
    """For the completion, such as ``IfNoneMatch``."""

    async def send(self, payload: Payload) -> None:
        """Send all parts and complete the upload; if anything fails for good, abort it and raise.

        Raises:
            ClientError: the completion was refused (its condition, for one, did not hold).
            StorageError: and its subclasses, for everything else.
        """
        wanted = {"ChecksumAlgorithm": "CRC32"} if self.checksums else {}
        created = await self.client.call(
            "create_multipart_upload", "put", self.key, Key=self.full_key, **self.arguments, **wanted
        )
        upload_id = created["UploadId"]
        try:
            done = await self._send_parts(upload_id, payload)
            await self.client.call_raw(
                "complete_multipart_upload",
                Key=self.full_key,
                UploadId=upload_id,
                MultipartUpload={"Parts": done},
                **self.condition,
            )
        except BaseException:
            await self._abort(upload_id)
            raise

    async def _send_parts(self, upload_id: str, payload: Payload) -> list[dict[str, Any]]:
        numbered = enumerate(cut_exactly(payload, self.part_bytes), start=1)
        done: dict[int, dict[str, Any]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.num_parallel):
                    group.create_task(self._work(upload_id, numbered, done))
        except BaseExceptionGroup as failed:
            # The first failure has cancelled the other workers; no part is on its way any more.
            raise failed.exceptions[0] from None
        return [done[number] for number in sorted(done)]

    async def _work(
        self, upload_id: str, numbered: Iterator[tuple[int, list[memoryview]]], done: dict[int, dict[str, Any]]
    ) -> None:
        """Send parts until none is left; the workers share one iterator."""
        for number, views in numbered:
            checksum = {"ChecksumCRC32": await loop.run_blocking(crc32, views)} if self.checksums else {}
            answer = await self._send_part(upload_id, number, views, checksum)
            # Servers that know no checksums do not name them in their answer, nor expect them in the completion.
            echoed = {name: value for name, value in checksum.items() if name in answer}
            done[number] = {"PartNumber": number, "ETag": answer["ETag"], **echoed}

    async def _send_part(
        self, upload_id: str, number: int, views: list[memoryview], checksum: Mapping[str, str]
    ) -> Mapping[str, Any]:
        attempt = 1
        while True:
            try:
                answer: Mapping[str, Any] = await self.client.call(
                    "upload_part",
                    "put",
                    self.key,
                    Key=self.full_key,
                    UploadId=upload_id,
                    PartNumber=number,
                    Body=PayloadBody(views),
                    **checksum,
                )
            except StorageError as error:
                if not error.retryable or attempt == _MAX_PART_ATTEMPTS:
                    raise
                logger.warning("attempt %d at part %d of %r failed: %s", attempt, number, self.key, error.message)
                await asyncio.sleep(_FIRST_DELAY_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1))  # noqa: S311
                attempt += 1
            else:
                return answer

    async def _abort(self, upload_id: str) -> None:
        """Abort as far as the server lets us; what stays is found by ``leftovers``."""
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self.client.call(
                    "abort_multipart_upload", "abort", self.key, Key=self.full_key, UploadId=upload_id
                )
        except (StorageError, TimeoutError) as error:
            logger.warning(
                "upload %s of %r in %s stays behind, unfinished and billed, because it could not be aborted: %s; "
                "remove it with leftovers() once the storage answers",
                upload_id,
                self.key,
                self.client.url,
                error,
            )
        except Exception as error:  # noqa: BLE001 - the failure that led here matters more
            logger.warning("upload %s of %r could not be aborted: %r", upload_id, self.key, error)
