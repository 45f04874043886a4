"""A conversion as data that crosses to other processes, and the same with its source open."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import ConfigError
from vescale_ckpt.interop.convert import to_dcp, to_npz, to_safetensors, to_torch_save, to_zarr
from vescale_ckpt.interop.convert.files import Layout
from vescale_ckpt.interop.convert.local_target import LocalTarget
from vescale_ckpt.interop.convert.native import MARK, NativeSource, open_native
from vescale_ckpt.interop.convert.options import ConvertOptions
from vescale_ckpt.interop.convert.remote_target import RemoteTarget
from vescale_ckpt.interop.foreign.detect import open_foreign
from vescale_ckpt.interop.foreign.places import local_path
from vescale_ckpt.interop.keymap.rules import KeyMap, load_keymap
from vescale_ckpt.interop.keymap.snapshot import MappedSnapshot
from vescale_storage.digest import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vescale_ckpt.interop.convert.target import Done, Target
    from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot

LAYOUTS: Final[dict[str, Callable[[ForeignSnapshot, ConvertOptions], Layout]]] = {
    "safetensors": to_safetensors.lay_out,
    "torch_save": to_torch_save.lay_out,
    "dcp": to_dcp.lay_out,
    "npz": to_npz.lay_out,
    "zarr": to_zarr.lay_out,
}
_SUFFIXES: Final = {
    ".safetensors": "safetensors",
    ".pt": "torch_save",
    ".pth": "torch_save",
    ".bin": "torch_save",
    ".ckpt": "torch_save",
    ".npz": "npz",
    ".zarr": "zarr",
}
_ONE_FILE: Final = frozenset({"torch_save", "npz"})
_PLAN_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every process needs to make the same plan."""

    source: str
    source_format: str | None
    source_options: Mapping[str, Any] | None
    target: str
    target_format: str
    target_options: Mapping[str, Any] | None
    options: ConvertOptions
    keymap: KeyMap | None
    snapshot: ForeignSnapshot | None = field(default=None, compare=False)
    """Where the caller has opened the source."""

    @property
    def to_store(self) -> bool:
        """Whether the target is a snapshot of a store."""
        return self.target_format == NativeSource.format


class Work:
    """A job with its source open."""

    def __init__(self, job: Job) -> None:
        self.job = job
        inner = job.snapshot or _open_source(job)
        self.source_format = inner.format
        try:
            self.source = inner if job.keymap is None else MappedSnapshot(inner, job.keymap)
            self.layout = Layout(()) if job.to_store else LAYOUTS[job.target_format](self.source, job.options)
            self.target = open_target(job)
        except BaseException:
            if job.snapshot is None:
                inner.close()
            raise

    def key(self) -> str:
        """Return what this conversion is: of which content, to what."""
        layout = [(file.name, file.num_bytes) for file in self.layout.files]
        plan = f"{_PLAN_VERSION} {self.job.target_format} {self.job.options} {self.job.keymap} {layout}"
        last = b"".join(digest(name.encode() + data) for name, data in sorted(self.layout.last.items()))
        return digest(self.source.fingerprint() + plan.encode(errors="surrogatepass") + last).hex()

    def clean(self) -> None:
        """Remove what an unfinished conversion left beside the target."""
        if not self.job.to_store:
            self.target.clean()

    def write(self, number: int, advance: Callable[[int], None]) -> Done:
        """Write one file."""
        done = self.target.write(number, self.layout.files[number], self.source.take_overflows, advance)
        done.peak_rss_bytes = peak_rss_bytes()
        return done


def peak_rss_bytes() -> int:
    """Return the largest resident size that this process has had."""
    try:
        status = Path("/proc/self/status").read_text("ascii", "replace")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # no Linux; what is said here counts a parent's size too
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _open_source(job: Job) -> ForeignSnapshot:
    if job.source_format == NativeSource.format or (job.source_format is None and MARK in job.source):
        return open_native(job.source, job.source_options)
    return open_foreign(job.source, format=job.source_format, storage_options=job.source_options)


def plan_job(
    source: str | os.PathLike[str] | ForeignSnapshot,
    target: str | os.PathLike[str],
    source_format: str | None,
    target_format: str | None,
    max_shard_bytes: int | None,
) -> Job:
    """Return the job of what the caller says.

    Raises:
        ConfigError: there is no such format.
    """
    place = os.fspath(target)
    suffix = next((suffix for suffix in _SUFFIXES if place.endswith(suffix)), "")
    found = target_format or (NativeSource.format if MARK in place else _SUFFIXES.get(suffix, "safetensors"))
    if found not in {*LAYOUTS, NativeSource.format}:
        raise ConfigError(f"cannot convert to {found!r}: known are {', '.join(sorted(LAYOUTS))}")
    is_file = found in _ONE_FILE or suffix == ".safetensors"
    is_url = isinstance(source, str | os.PathLike)
    return Job(
        source=os.fspath(source) if is_url else source.url,  # type: ignore[arg-type, union-attr]
        source_format=source_format,
        source_options=None,
        target=place,
        target_format=found,
        target_options=None,
        options=ConvertOptions(
            file_name=place.rstrip("/").rpartition("/")[2] if is_file else "", max_shard_bytes=max_shard_bytes
        ),
        keymap=None,
        snapshot=None if is_url else source,  # type: ignore[arg-type]
    )


def keymap_of(keymap: str | os.PathLike[str] | KeyMap | None, settings: Mapping[str, int] | None) -> KeyMap | None:
    """Return the key map that the caller means."""
    if isinstance(keymap, str | os.PathLike):
        return load_keymap(os.fspath(keymap), dict(settings or {}))
    return keymap


def open_target(job: Job) -> Target:
    """Return where a job writes."""
    path = local_path(job.target)
    is_file = bool(job.options.file_name)
    return (
        RemoteTarget(job.target, job.target_options, is_file=is_file)
        if path is None
        else LocalTarget(path, is_file=is_file)
    )
