"""One measured piece of work: wall and CPU seconds, bytes through the kernel, peak memory, and counters of its own.

CPU seconds are those of this process with all its threads and of children it waited for (on request also of those that
live); on a busy machine they say more than wall seconds. What the kernel does behind a process's back (writing dirty
pages) is in neither.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import statistics
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_PROC = Path("/proc/self")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What one run of one side took."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int = 0
    """Highest resident set, less what it was when the work began; 0 where the system cannot tell."""
    file_read_bytes: int = 0
    """Through ``read``, from files and page cache alike; memory maps are not seen."""
    file_write_bytes: int = 0
    disk_read_bytes: int = 0
    """Of the reads, what came from the disk: near nothing on a warm cache."""
    counters: dict[str, float] = field(default_factory=dict)
    """What the side itself counted."""

    def quantity(self, name: str) -> float:
        """Return a field or counter by name.

        Raises:
            KeyError: this sample has none such.
        """
        if name in self.counters:
            return self.counters[name]
        if name not in self.__slots__ or name == "counters":
            raise KeyError(name)
        return float(getattr(self, name))

    def has(self, name: str) -> bool:
        """Return whether there is a quantity of this name."""
        return name in self.counters or (name in self.__slots__ and name != "counters")

    def to_json(self) -> dict[str, Any]:
        """Return the sample as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        """Return the sample of ``to_json``."""
        return cls(**data)

    @classmethod
    def over_ranks(cls, samples: Sequence[Sample]) -> Sample:
        """Return one sample for work that several ranks did together: the longest wall, the sum of all else."""
        names = sorted({name for sample in samples for name in sample.counters})
        return cls(
            wall_seconds=max(s.wall_seconds for s in samples),
            cpu_seconds=sum(s.cpu_seconds for s in samples),
            peak_bytes=sum(s.peak_bytes for s in samples),
            file_read_bytes=sum(s.file_read_bytes for s in samples),
            file_write_bytes=sum(s.file_write_bytes for s in samples),
            disk_read_bytes=sum(s.disk_read_bytes for s in samples),
            counters={name: sum(s.counters.get(name, 0) for s in samples) for name in names},
        )


@dataclass(slots=True)
class Measurement:
    """A measurement under way; ``sample`` once the ``with`` has ended."""

    counters: dict[str, float] = field(default_factory=dict)
    """The work may add to it."""
    _taken: Sample | None = None

    @property
    def sample(self) -> Sample:
        """What the work took."""
        assert self._taken is not None, "the work has not ended"  # noqa: S101 -- a mistake of the benchmark itself
        return self._taken


@contextmanager
def measure(*, live_children: bool = False) -> Iterator[Measurement]:
    """Measure the body.

    Args:
        live_children: whether processes that this one has started and that go on count as its work.
    """
    gc.collect()
    taken = Measurement()
    before_io, resident = _io(), reset_peak()
    began_cpu, began = cpu_seconds(live_children=live_children), time.perf_counter()
    yield taken
    wall, cpu = time.perf_counter() - began, cpu_seconds(live_children=live_children) - began_cpu
    after_io = _io()
    taken._taken = Sample(  # noqa: SLF001 -- its other half
        wall_seconds=wall,
        cpu_seconds=cpu,
        peak_bytes=max(0, peak_resident_bytes() - resident),
        file_read_bytes=after_io["rchar"] - before_io["rchar"],
        file_write_bytes=after_io["wchar"] - before_io["wchar"],
        disk_read_bytes=after_io["read_bytes"] - before_io["read_bytes"],
        counters=taken.counters,
    )


def cpu_seconds(*, live_children: bool = False) -> float:
    """Return user and system seconds of this process and of its children that have ended, and of those that live."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    alive = sum(map(_cpu_seconds_of, _children(os.getpid()))) if live_children else 0.0
    return sum(u.ru_utime + u.ru_stime for u in used) + alive


def _children(pid: int) -> list[int]:
    """Return the live processes that a process has started, and those that they have started."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_children(int(child))]
    except OSError:
        return found
    return found


def _cpu_seconds_of(pid: int) -> float:
    """Return what a live process has used, with those of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def reset_peak() -> int:
    """Forget the highest resident set so far; return the present one, or 0 where the system cannot tell."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return 0
    return resident_bytes()


def resident_bytes() -> int:
    """Return the resident set, or 0 where the system cannot tell."""
    try:
        return int((_PROC / "statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def peak_resident_bytes() -> int:
    """Return the highest resident set since ``reset_peak``, or 0 where the system cannot tell."""
    try:
        lines = (_PROC / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _io() -> dict[str, int]:
    try:
        lines = (_PROC / "io").read_text().splitlines()
    except OSError:
        return dict.fromkeys(("rchar", "wchar", "read_bytes"), 0)
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def median(values: Iterable[float]) -> float:
    """Return the middle value."""
    return statistics.median(list(values))


def settle(folder: Path) -> None:
    """Let what earlier work left to the disk be written, so that it does not slow the next piece."""
    gc.collect()
    if storage_of(folder) == "disk":
        os.sync()


def evict(folder: Path) -> None:
    """Drop the files of a folder from the page cache, as far as the kernel heeds it; ``disk_read_bytes`` tells."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def stored(folder: Path) -> dict[str, float]:
    """Return what lies in a folder as counters: ``bytes_stored`` and ``files``."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {"bytes_stored": sum(sizes), "files": len(sizes)}


def storage_of(folder: Path) -> str:
    """Return ``tmpfs`` or ``disk``: where a folder lies."""
    best = ("", "")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return "tmpfs" if best[1] in {"tmpfs", "ramfs"} else "disk"
