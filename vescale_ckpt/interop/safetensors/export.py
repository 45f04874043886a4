"""Export: a plan's files are written next to their place, band by band, and moved there when all of them are whole.

Memory stays within a budget whatever the tensors' sizes: a few bands are read ahead while one is written.
"""

from __future__ import annotations

import collections
import re
import secrets
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch

from vescale_ckpt.errors import AlreadyExistsError, ConfigError, InternalError, NoSpaceError
from vescale_ckpt.interop.safetensors.bands import bands
from vescale_ckpt.interop.safetensors.folder import INDEX_NAME, SINGLE_NAME
from vescale_ckpt.interop.safetensors.local import file_errors
from vescale_ckpt.stage.raw import memory_of
from vescale_storage.backends.posix import sync_file, sync_folder

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.interop.safetensors.plan import ExportFile, ExportPlan, ExportTensor
    from vescale_ckpt.state.tree import Path as KeyPath

DEFAULT_BUFFER_BYTES: Final = 128 << 20
_NUM_AHEAD: Final = 2
_SHARD_NAME: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_STAGE_PREFIX: Final = ".vescale-export-"


class Readable(Protocol):
    """What an export needs of a ``Snapshot``."""

    @property
    def name(self) -> str:
        """``run@step``."""

    @property
    def manifest(self) -> Manifest:
        """The whole description."""

    def read(self, path: str | KeyPath, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor as a new CPU tensor."""


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The folder that files will go to, looked at and not touched."""

    folder: Path
    removed: tuple[str, ...]
    """What an overwriting export removes there: the weights of an earlier one."""


@dataclass(slots=True)
class ExportReport:
    """What an export did."""

    files: tuple[Path, ...]
    num_tensors: int
    num_bytes: int
    """Of the tensors."""
    seconds: float = 0.0
    overflowed: dict[str, int] = field(default_factory=dict)
    """Cast tensors -> how many of their finite values became infinite."""


def check_target(folder: str | os.PathLike[str], *, overwrite: bool = False) -> ExportTarget:
    """Return the folder to export to; it may be absent.

    Raises:
        AlreadyExistsError: it is not empty and ``overwrite`` is false, or it is no folder.
        AccessDeniedError, StorageError: it cannot be looked into.
    """
    path = Path(folder).expanduser().absolute()
    with file_errors("look into", path):
        if not path.exists():
            return ExportTarget(path, ())
        if not path.is_dir():
            raise AlreadyExistsError(f"cannot export to {path}: it is a file; name a folder", path=str(path))
        names = sorted(entry.name for entry in path.iterdir())
    if names and not overwrite:
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        raise AlreadyExistsError(
            f"cannot export to {path}: it is not empty ({shown}); name another folder, or --overwrite the "
            "weights in it",
            path=str(path),
        )
    return ExportTarget(path, tuple(name for name in names if _is_ours(name)))


def _is_ours(name: str) -> bool:
    return name in {SINGLE_NAME, INDEX_NAME} or bool(_SHARD_NAME.fullmatch(name)) or name.startswith(_STAGE_PREFIX)


def export_snapshot(
    snapshot: Readable,
    plan: ExportPlan,
    target: ExportTarget,
    *,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    progress: Callable[[int], None] | None = None,
) -> ExportReport:
    """Write the files of a plan and return what was done; every byte read is verified.

    Nothing has its final name before all of it is on disk. Where several files replace as many of an earlier export, an
    interruption at the very end can leave the folder without an index, so that nothing is read; never a mixture.

    Args:
        snapshot: what the plan was made of.
        plan: what to write.
        target: where to.
        buffer_bytes: bound of the tensors held at once, beside what reading them takes.
        progress: called with the bytes just written.

    Raises:
        CorruptionError: stored bytes are damaged; nothing is left in the folder.
        NoSpaceError: the disk is full, or would be.
        AccessDeniedError, StorageError: the folder cannot be written, or the store not be read.
    """
    if buffer_bytes < 1 << 20:
        raise ConfigError(f"cannot export with buffer_bytes={buffer_bytes}: at least 1 MiB")
    began = time.monotonic()
    report = ExportReport(
        files=tuple(target.folder / file.name for file in plan.files),
        num_tensors=sum(len(file.tensors) for file in plan.files),
        num_bytes=plan.num_bytes,
    )
    with _staging(target.folder) as stage:
        _refuse_full_disk(stage, plan)
        writer = _Writer(snapshot, report, buffer_bytes, progress)
        for file in plan.files:
            writer.write(file, stage / file.name)
        if plan.index is not None:
            with file_errors("write", stage / INDEX_NAME):
                _write_small(stage / INDEX_NAME, plan.index)
        _publish(stage, plan, target)
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Yield a new folder inside ``folder``, which is made, and removed again where the block fails."""
    stage = folder / f"{_STAGE_PREFIX}{secrets.token_hex(8)}"
    existed = folder.exists()
    with file_errors("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if not existed and not any(folder.iterdir()):
            folder.rmdir()


def _refuse_full_disk(stage: Path, plan: ExportPlan) -> None:
    with file_errors("look at", stage):
        usage = shutil.disk_usage(stage)
    if usage.total and usage.free < plan.disk_bytes:  # some network file systems do not say
        raise NoSpaceError(
            f"cannot export {plan.snapshot}: it needs {plan.disk_bytes} bytes and the disk of {stage.parent} has "
            f"{usage.free} free; free space or choose another disk",
            path=str(stage.parent),
        )


class _Writer:
    """Writes the files of one export."""

    def __init__(
        self,
        snapshot: Readable,
        report: ExportReport,
        buffer_bytes: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._snapshot = snapshot
        self._manifest = snapshot.manifest
        self._report = report
        self._buffer_bytes = buffer_bytes
        self._progress = progress or (lambda _: None)

    def write(self, file: ExportFile, path: Path) -> None:
        """Write one file and return when it is on disk."""
        with file_errors("write", path), path.open("xb") as out:
            out.write(file.header)
            for tensor, band in self._read_ahead(file.tensors):
                memory = memory_of(self._cast(band, tensor).reshape(-1).view(torch.uint8))
                out.write(memory)
                self._progress(len(memory))
            if out.tell() != file.num_bytes:
                raise InternalError(f"wrote {out.tell()} bytes to {path}, planned {file.num_bytes}; please report it")
            out.flush()
            sync_file(out.fileno())

    def _read_ahead(self, tensors: Sequence[ExportTensor]) -> Iterator[tuple[ExportTensor, torch.Tensor]]:
        """Yield every band of some tensors in order, while the next ones are being read."""
        waiting: collections.deque[tuple[ExportTensor, int, Future[torch.Tensor]]] = collections.deque()
        held_bytes = 0
        with ThreadPoolExecutor(_NUM_AHEAD, thread_name_prefix="vescale-export") as workers:
            try:
                for tensor, box, num_bytes in self._bands(tensors):
                    while waiting and held_bytes + num_bytes > self._buffer_bytes:
                        done, size, future = waiting.popleft()
                        yield done, future.result()
                        held_bytes -= size
                    path = self._manifest.tensors[tensor.index].path
                    waiting.append((tensor, num_bytes, workers.submit(self._snapshot.read, path, box)))
                    held_bytes += num_bytes
                while waiting:
                    done, _, future = waiting.popleft()
                    yield done, future.result()
            finally:
                for _, _, future in waiting:
                    future.cancel()

    def _bands(self, tensors: Sequence[ExportTensor]) -> Iterator[tuple[ExportTensor, Box, int]]:
        """Yield (tensor, band, bytes that it takes in memory, with the cast copy)."""
        max_bytes = self._buffer_bytes // (_NUM_AHEAD + 1)  # one that is written, and those ahead of it
        for tensor in tensors:
            record = self._manifest.tensors[tensor.index]
            item_bytes = tensor.stored.itemsize + (tensor.dtype.itemsize if tensor.dtype != tensor.stored else 0)
            for box in bands(record.shape, record.tile, item_bytes, max_bytes):
                yield tensor, box, box.volume * item_bytes

    def _cast(self, band: torch.Tensor, tensor: ExportTensor) -> torch.Tensor:
        if tensor.dtype == tensor.stored:
            return band
        cast = band.to(tensor.dtype)
        if torch.finfo(tensor.dtype).max < torch.finfo(tensor.stored).max:
            num_overflowed = int((cast.isinf() & band.isfinite()).sum())
            if num_overflowed:
                counts = self._report.overflowed
                counts[tensor.name] = counts.get(tensor.name, 0) + num_overflowed
        return cast


def _write_small(path: Path, content: bytes) -> None:
    with path.open("xb") as out:
        out.write(content)
        out.flush()
        sync_file(out.fileno())


def _publish(stage: Path, plan: ExportPlan, target: ExportTarget) -> None:
    """Give the files their names, so that a reader finds the old weights whole, or the new, or none.

    Readers prefer the single file, and find several only by their index. So the new files come first, then the index,
    and the old files go last; where new files take the place of old ones of the same names, the old index goes first.
    """
    folder = target.folder
    new = [file.name for file in plan.files]
    with file_errors("write to", folder):
        sync_folder(stage)
        if plan.index is not None and not set(new).isdisjoint(target.removed):
            (folder / INDEX_NAME).unlink(missing_ok=True)
            sync_folder(folder)
        for name in new:
            (stage / name).replace(folder / name)
        sync_folder(folder)
        if plan.index is not None:
            (stage / INDEX_NAME).replace(folder / INDEX_NAME)
            new.append(INDEX_NAME)
            sync_folder(folder)
        for name in target.removed:
            if name not in new:
                _remove(folder / name)
        sync_folder(folder)


def _remove(path: Path) -> None:
    if path.name.startswith(_STAGE_PREFIX):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
