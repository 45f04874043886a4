import asyncio
import gc
import os
import subprocess
import sys
import warnings

import pytest

from vescale_storage import loop
from vescale_storage.backends.s3_client import S3Client, _with_defaults
from vescale_storage.errors import ConfigError


def client_of(s3_url):
    return S3Client(s3_url.url, "tests", s3_url.storage_options)


def test_every_request_is_one_attempt_unless_configured():
    options = _with_defaults({"key": "k", "config_kwargs": {"read_timeout": 5, "s3": {"addressing_style": "path"}}})
    assert options["key"] == "k"
    config = options["config_kwargs"]
    assert config["retries"]["total_max_attempts"] == 1
    assert config["read_timeout"] == 5
    assert config["s3"] == {"addressing_style": "path", "payload_signing_enabled": False}
    assert _with_defaults({"config_kwargs": {"retries": {"total_max_attempts": 3}}})["config_kwargs"]["retries"] == {
        "total_max_attempts": 3
    }


def test_options_are_not_changed():
    options = {"config_kwargs": {"s3": {}}}
    _with_defaults(options)
    assert options == {"config_kwargs": {"s3": {}}}


@pytest.mark.parametrize(("setting", "sends"), [({}, True), ({"request_checksum_calculation": "when_required"}, False)])
def test_checksums_follow_the_configuration(setting, sends):
    async def check():
        client = S3Client("s3://b", "b", {"key": "k", "secret": "s", "config_kwargs": setting})
        try:
            assert await client.sends_checksums() is sends
        finally:
            await client.close()

    asyncio.run(check())


def test_bad_options_are_named():
    async def check():
        with pytest.raises(ConfigError, match=r"s3://b .*nonsense"):
            await S3Client("s3://b", "b", {"nonsense": 1}).sends_checksums()

    asyncio.run(check())


@pytest.mark.s3
def test_one_session_for_every_loop(s3_url):
    client = client_of(s3_url)

    async def use():
        await client.call("head_bucket", "head", "")
        await client.call("head_bucket", "head", "")
        assert len(client._sessions) == 1
        await client.close()
        await client.close()
        assert not client._sessions

    for _ in range(2):
        asyncio.run(use())


_FORGETFUL = """
import sys
from vescale_storage import loop
from vescale_storage.backends import open_backend

backend = open_backend(sys.argv[1], {"endpoint_url": sys.argv[2], "key": sys.argv[3], "secret": sys.argv[4]})
loop.run(backend.put("k", [b"x"]))
"""


@pytest.mark.s3
def test_a_process_that_closes_nothing_ends_in_silence(s3_url):
    options = s3_url.storage_options
    arguments = [s3_url.url, options["endpoint_url"], options["key"], options["secret"]]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _FORGETFUL, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.s3
def test_a_forked_child_that_ends_in_order_leaves_the_parents_connections_alone(s3_url):
    """A child that collects the parent's connections must not take their sockets out of the epoll that both share."""
    client = client_of(s3_url)
    loop.run(client.call("head_bucket", "head", ""))
    (session,) = client._sessions.values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            client._sessions.clear()
            del session
            gc.collect()
            loop.run(client.call("head_bucket", "head", ""))
            loop.run(client.close())
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for _ in range(3):
        loop.run(asyncio.wait_for(client.call("head_bucket", "head", ""), 5))
    loop.run(client.close())
