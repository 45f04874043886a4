import asyncio
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from vescale_storage.backends import open_backend
from vescale_storage.backends.fsspec import FsspecBackend
from vescale_storage.backends.local import LocalBackend
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.backends.s3 import S3Backend
from vescale_storage.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("/srv/a b", LocalBackend, "/srv/a b"),
        (Path("/srv/x"), LocalBackend, "/srv/x"),
        ("file:///srv/x%20y", LocalBackend, "/srv/x%20y"),
        ("local:///srv/x/", LocalBackend, "/srv/x"),
        ("~/x", LocalBackend, str(Path.home() / "x")),
        ("rel/x", LocalBackend, str(Path.cwd() / "rel/x")),
        ("C:odd", LocalBackend, str(Path.cwd() / "C:odd")),
        ("memory://a/b/", MemoryBackend, "memory://a/b"),
        ("s3://bucket/p/", S3Backend, "s3://bucket/p"),
        ("s3a://bucket/p", S3Backend, "s3://bucket/p"),
        ("own://user:secret@host/x", FsspecBackend, "own://host/x"),
    ],
)
def test_schemes(url, kind, shown):
    fsspec.register_implementation("own", MemoryFileSystem, clobber=True)
    backend = open_backend(url)
    assert type(backend) is kind
    assert backend.url == shown


@pytest.mark.parametrize(
    ("url", "options", "match"),
    [
        ("", None, "empty URL"),
        ("simplecache::s3://bucket", None, "chained"),
        ("nonsense://x", None, "nonsense"),
        ("/srv/x", {"durabel": True}, r"\['durabel'\]: known are \['durable', 'num_threads'\]"),
        ("memory://x", {"key": 1}, r"\['key'\]"),
    ],
)
def test_what_cannot_be_opened(url, options, match):
    with pytest.raises(ConfigError, match=match):
        open_backend(url, options)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("gs://bucket/p", "gcsfs", "gcs"), ("az://container/p", "adlfs", "azure"), ("abfss://c/p", "abfss", "azure")],
)
def test_a_missing_package_is_named_with_its_extra(url, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}.*pip install 'vescale-ckpt\[{extra}\]'"):
        open_backend(url)


def test_options_reach_the_back_end_and_are_not_changed(tmp_path):
    options = {"durable": False, "num_threads": 3}
    backend = open_backend(tmp_path, options)
    assert not backend.capabilities.durable
    assert backend.capabilities.get_concurrency == 3
    options = {"key": "k", "conditional_put": False, "part_bytes": 7 * 2**20}
    assert not open_backend("s3://bucket", options).capabilities.conditional_put
    assert options == {"key": "k", "conditional_put": False, "part_bytes": 7 * 2**20}


def test_memory_is_shared_by_name():
    asyncio.run(open_backend("memory://shared-by-name").put("k", [b"x"]))
    assert asyncio.run(open_backend("memory://shared-by-name").get("k")) == b"x"


def test_opening_a_local_store_imports_no_client_library():
    code = (
        "import sys, vescale_storage.backends as b; b.open_backend('/srv/x');"
        "sys.exit(any(name in sys.modules for name in ('s3fs', 'fsspec', 'botocore', 'aiohttp')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
