"""Requests to one bucket through s3fs: one session for every event loop, one attempt for every request.

s3fs finds the credentials and builds the client, from the same options and environment as everywhere else that s3fs is
used. Its own retries and botocore's are turned off: they would repeat a conditional put behind the back of the code
that must know of it, and multiply with the retries of the wrapper.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import botocore.exceptions
import s3fs

from vescale_storage.backends import s3_errors
from vescale_storage.errors import ConfigError, VeScaleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CLOSE_SECONDS: Final = 1.0
_DEFAULT_CONFIG: Final[Mapping[str, Any]] = {
    "connect_timeout": 5,
    # S3 may think for minutes over the completion of an upload, but it sends a blank now and then.
    "read_timeout": 60,
    "max_pool_connections": 64,
    "retries": {"mode": "standard", "total_max_attempts": 1},
}
# Hashing the body for its signature would hold the event loop; the checksum that travels with it is made on a thread.
_DEFAULT_S3_CONFIG: Final[Mapping[str, Any]] = {"payload_signing_enabled": False}


class Endpoint(NamedTuple):
    """Where requests go and as whom, for a client of another library that is to do the same."""

    url: str
    region: str
    key: str | None
    """None for requests that are not signed."""
    secret: str | None
    token: str | None


class S3Client:
    """Sends requests for one bucket, and raises only errors of this package.

    Args:
        url: ``s3://bucket/prefix``, for messages.
        bucket: the bucket's name or access point.
        options: what ``s3fs.S3FileSystem`` takes.
    """

    def __init__(self, url: str, bucket: str, options: Mapping[str, Any]) -> None:
        self.url = url
        self.bucket = bucket
        self._options = _with_defaults(options)
        # aiohttp's connections belong to the loop that opened them. Loops are few: one a process, or one a test.
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}
        self._bucket_seen = False

    async def call(self, method: str, action: str, key: str, /, **arguments: Any) -> Any:
        """Return the answer to one request, e.g. ``call("get_object", "get", key, Key=..., Range=...)``.

        Raises:
            VeScaleError: translated from what the client library raised.
        """
        try:
            return await self.call_raw(method, **arguments)
        except s3_errors.TRANSLATED as error:
            raise await self._explain(error, action, key) from error

    async def call_raw(self, method: str, /, **arguments: Any) -> Any:
        """Return the answer to one request, with the client library's own errors."""
        filesystem = await self._open()
        answer = await filesystem._call_s3(method, Bucket=self.bucket, **arguments)  # noqa: SLF001
        self._bucket_seen = True
        return answer

    @contextlib.contextmanager
    def translated(self, action: str, key: str) -> Iterator[None]:
        """Translate what reading a body raises."""
        try:
            yield
        except VeScaleError:
            raise
        except s3_errors.TRANSLATED as error:
            raise s3_errors.translate(error, action, key, url=self.url) from error

    async def sends_checksums(self) -> bool:
        """Return whether uploads carry checksums (``request_checksum_calculation``, on unless configured off)."""
        client = await (await self._open()).set_session()
        return bool(client.meta.config.request_checksum_calculation != "when_required")

    async def endpoint(self) -> Endpoint:
        """Return what s3fs has found; temporary credentials are renewed on the way, so ask before every request.

        Raises:
            NoCredentialsError: there are none.
        """
        filesystem = await self._open()
        client = await filesystem.set_session()
        place = (client.meta.endpoint_url, client.meta.region_name)
        if filesystem.anon:
            return Endpoint(*place, None, None, None)
        if filesystem.key and filesystem.secret:
            return Endpoint(*place, filesystem.key, filesystem.secret, filesystem.token)
        found = await filesystem.session.get_credentials()
        if found is None:
            raise botocore.exceptions.NoCredentialsError
        frozen = await found.get_frozen_credentials()
        return Endpoint(*place, frozen.access_key, frozen.secret_key, frozen.token)

    async def close(self) -> None:
        """Close the connections of this loop; those of other loops close with the process."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None and session.pid == os.getpid():
            await session.close()

    async def _open(self) -> s3fs.S3FileSystem:
        filesystem = self._session().filesystem
        try:
            await filesystem.set_session()
        except (TypeError, ValueError, botocore.exceptions.BotoCoreError) as error:
            raise ConfigError(f"cannot open {self.url} with these storage_options: {error}") from error
        return filesystem

    def _session(self) -> _Session:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.pid != os.getpid():
            for other in tuple(self._sessions):
                if other.is_closed():
                    self._sessions.pop(other, None)
            session = _Session(loop, self.url, self._options)
            self._sessions[loop] = session
        return session

    async def _explain(self, error: BaseException, action: str, key: str) -> Exception:
        if s3_errors.is_absent(error) and not self._bucket_seen:
            # The answer to a HEAD has no body that could tell a missing bucket from a missing object.
            try:
                await self.call_raw("head_bucket")
            except s3_errors.TRANSLATED as bucket_error:
                if s3_errors.is_absent(bucket_error) or s3_errors.is_absent_bucket(bucket_error):
                    return s3_errors.absent_bucket(action, key, url=self.url)
        return s3_errors.translate(error, action, key, url=self.url)


class _Session:
    """One s3fs file system on one loop of one process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, url: str, options: Mapping[str, Any]) -> None:
        self.pid = os.getpid()
        self._loop = loop
        try:
            self.filesystem = s3fs.S3FileSystem(
                asynchronous=True, skip_instance_cache=True, use_listings_cache=False, **options
            )
        except (TypeError, ValueError, KeyError, botocore.exceptions.BotoCoreError) as error:
            raise ConfigError(f"cannot open {url} with these storage_options: {error}") from error
        self.filesystem.retries = 1
        # Registered after the loop thread's own hook, so it runs before that loop ends.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        _live_sessions.add(self)

    async def close(self) -> None:
        """Close the connections."""
        atexit.unregister(self._at_exit)
        client = self.filesystem._s3  # noqa: SLF001 - set_session() would open one only to close it
        if client is not None:
            await client.close()

    def close_from_outside(self) -> None:
        """Close the connections from a thread that is not the loop's, if the loop still runs."""
        if self.pid == os.getpid() and self._loop.is_running():
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self.close(), self._loop).result(_CLOSE_SECONDS)

    def disown(self) -> None:
        """Forget the connections without closing them: they belong to the process that this one was forked from.

        Closing a socket takes it out of the loop's epoll, which parent and child share: the parent would never hear of
        it again. So here the connections pass for closed already, and nothing is done when they are collected.
        """
        endpoint = getattr(self.filesystem._s3, "_endpoint", None)  # noqa: SLF001 - see above
        for session in (getattr(getattr(endpoint, "http_session", None), "_sessions", None) or {}).values():
            session.connector._closed = True  # noqa: SLF001 - see above


_live_sessions: weakref.WeakSet[_Session] = weakref.WeakSet()


def _disown_all() -> None:
    for session in _live_sessions:
        session.disown()


os.register_at_fork(after_in_child=_disown_all)


def _close_at_exit(reference: weakref.ref[_Session]) -> None:
    session = reference()
    if session is not None:
        session.close_from_outside()


def _with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(options.get("config_kwargs") or {})
    s3_config = {**_DEFAULT_S3_CONFIG, **(config.get("s3") or {})}
    return {**options, "config_kwargs": {**_DEFAULT_CONFIG, **config, "s3": s3_config}}
