"""A job: the processes of one training run on this machine, started as torchrun would, and ended as a scheduler may.

All ranks are one process group, so that one signal reaches them all at once: to freeze the job, to let it go on, or to
kill it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

POLL_SECONDS = 0.05
LOG_TAIL_LINES = 15
FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Below the range from which systems give out ports by themselves, so that nobody is given ours meanwhile."""


class JobError(Exception):
    """A rank failed or the job took too long; the message says which, and how its log ends."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to start."""

    script: Path
    arguments: tuple[str, ...]
    num_ranks: int
    log_folder: Path
    timeout_seconds: float
    """How long it may take; then all ranks are killed."""


class Job:
    """Running ranks; leaving the ``with`` block kills what still runs."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._deadline = time.monotonic() + command.timeout_seconds

    def __enter__(self) -> Self:
        self._command.log_folder.mkdir(parents=True, exist_ok=True)
        environment = _common_environment(self._command.num_ranks)
        try:
            for rank in range(self._command.num_ranks):
                self._ranks.append(self._start(rank, environment))
                self._guard = self._guard or _start_guard(self._ranks[0].pid)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def wait(self, watch: Callable[[], None] = lambda: None) -> None:
        """Return when all ranks have ended well; ``watch`` is called now and then meanwhile.

        Raises:
            JobError: a rank failed, or time is up. The other ranks are killed.
        """
        while self.is_running():
            watch()
            time.sleep(POLL_SECONDS)

    def is_running(self) -> bool:
        """Return whether any rank still runs.

        Raises:
            JobError: a rank failed, or time is up. The other ranks are killed.
        """
        codes = [rank.poll() for rank in self._ranks]
        failed = [number for number, code in enumerate(codes) if code]
        if failed:
            self.kill()
            raise JobError(f"rank {failed[0]} ended with code {codes[failed[0]]}\n{self._log_tail(failed[0])}")
        if None in codes and time.monotonic() > self._deadline:
            self.kill()
            raise JobError(f"not done after {self._command.timeout_seconds:g} s\n{self._log_tail(0)}")
        return None in codes

    def freeze(self) -> None:
        """Stop all ranks where they are; none of them can notice."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let frozen ranks go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End all ranks at once with SIGKILL: they can do nothing about it, and write nothing more."""
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        self._signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.wait()

    def _start(self, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(  # noqa: S603  our own script
                [sys.executable, str(self._command.script), *self._command.arguments],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=self._ranks[0].pid if self._ranks else 0,
            )

    def _signal(self, number: signal.Signals) -> None:
        # A group lives as long as one of its processes is not waited for; only then is its number surely still ours.
        if any(rank.returncode is None for rank in self._ranks):
            os.killpg(self._ranks[0].pid, number)

    def _log(self, rank: int) -> Path:
        return self._command.log_folder / f"rank-{rank}.log"

    def _log_tail(self, rank: int) -> str:
        lines = self._log(rank).read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"{self._log(rank)} ends:", *lines[-LOG_TAIL_LINES:]])


def _start_guard(group: int) -> subprocess.Popen[bytes]:
    """Start a process that kills a process group when this process dies, however it dies: its end of a pipe closes."""
    return subprocess.Popen(  # noqa: S603  our own script
        ["/bin/sh", "-c", 'cat > /dev/null; kill -s KILL -- "-$1"', "guard", str(group)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _common_environment(num_ranks: int) -> dict[str, str]:
    """Return what torchrun would set, for ranks that share this machine and meet on its loopback interface."""
    environment = dict(os.environ)
    environment |= {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": _loopback_interface([name for _, name in socket.if_nameindex()]),
        "OMP_NUM_THREADS": "1",
    }
    return environment


def _loopback_interface(names: Sequence[str]) -> str:
    return "lo" if "lo" in names else "lo0"


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    first = os.getpid() * 8 % NUM_PORTS  # two demos at the same time look at different ones
    for number in range(NUM_PORTS):
        port = FIRST_PORT + (first + number) % NUM_PORTS
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise JobError(f"no free port from {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} on 127.0.0.1")
