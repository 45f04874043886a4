"""Where URLs become back ends: the one place that knows which class serves which scheme."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_storage.backends.local import LocalBackend
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.backends.probe import probe_conditional_put
from vescale_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vescale_storage.backend import Backend

__all__ = ["open_backend", "probe_conditional_put"]

_LOCAL_SCHEMES = frozenset({"", "file", "local"})
_S3_SCHEMES = frozenset({"s3", "s3a"})
_S3_OPTIONS = frozenset({"multipart_bytes", "part_bytes", "num_parallel", "conditional_put"})
_LOCAL_OPTIONS = frozenset({"durable", "num_threads"})


def open_backend(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Backend:
    """Return the back end of a URL or local path, without any I/O beyond a look at a local folder.

    Args:
        url: a path or ``file://`` URL, ``memory://name`` (this process only), ``s3://bucket/prefix``, or a URL of any
            other scheme that fsspec knows.
        storage_options: for a local folder ``durable`` and ``num_threads``; for others what the file system's class
            takes (for S3: ``key``, ``secret``, ``token``, ``endpoint_url``, ``client_kwargs``, ...). For S3 also
            ``client``: ``s3fs``, or ``obstore`` for its fast path (the extra ``fast``).

    Raises:
        ConfigError: the URL is empty or names an unknown scheme, or an option is unknown.
    """
    text = os.fspath(url)
    options = dict(storage_options or {})
    if not text:
        raise ConfigError("cannot open a store at an empty URL; pass a path or a URL such as s3://bucket/prefix")
    if "::" in text:
        raise ConfigError(f"cannot open {text!r}: chained URLs cache what they read; pass the inner URL alone")
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    if scheme in _LOCAL_SCHEMES:
        _refuse_unknown(text, options, _LOCAL_OPTIONS)
        return LocalBackend(Path(rest).expanduser(), **options)
    if scheme == "memory":
        _refuse_unknown(text, options, frozenset())
        return MemoryBackend(rest.rstrip("/"))
    if scheme in _S3_SCHEMES:
        return _open_s3(f"s3://{rest}", options)
    from vescale_storage.backends.fsspec import FsspecBackend  # noqa: PLC0415 - likewise

    return FsspecBackend(text, options)


def _open_s3(url: str, options: dict[str, Any]) -> Backend:
    # Only now: the S3 client takes half a second to import, and few need it.
    from vescale_storage.backends.s3 import S3Backend  # noqa: PLC0415

    own = {name: options.pop(name) for name in _S3_OPTIONS & set(options)}
    client = options.pop("client", "s3fs")
    if client == "s3fs":
        return S3Backend(url, options, **own)
    if client != "obstore":
        raise ConfigError(f"cannot open {url!r} with client={client!r}: known are 's3fs' and 'obstore'")
    try:
        from vescale_storage.backends.obstore import ObstoreBackend  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"cannot open {url!r} with client='obstore': {error}; pip install 'vescale-ckpt[fast]', or leave out client"
        ) from error
    return ObstoreBackend(url, options, **own)


def _refuse_unknown(url: str, options: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"cannot open {url!r} with options {unknown}: known are {sorted(known)}")
