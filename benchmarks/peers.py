"""Sides that save and load a dict of tensors in one process: ours and the peers', each by its own usual calls."""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter

import vescale_ckpt as vc
from benchmarks.case import DCP, OURS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from benchmarks.states import State
    from vescale_storage.wrappers.count import Counts

RUN = "bench"


class Side(abc.ABC):
    """Saves states to folders and loads them into place. ``save`` returns when what it promises is kept."""

    name: str

    @abc.abstractmethod
    def save(self, state: State, folder: Path) -> dict[str, float]:
        """Save under a folder; return counters."""

    @abc.abstractmethod
    def load(self, state: State, folder: Path) -> dict[str, float]:
        """Fill ``state`` in place from what was saved last under a folder; return counters."""

    def discard(self, folder: Path) -> None:
        """Remove what was saved, as far as the next save does not need it."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Release what was kept from save to save."""


class Ours(Side):
    """One ``Checkpointer`` that saves step after step into one store, as training does."""

    def __init__(
        self,
        name: str = OURS,
        *,
        options: vc.SaveOptions | None = None,
        storage_options: dict[str, Any] | None = None,
        read_options: vc.ReadOptions | None = None,
    ) -> None:
        self.name = name
        self._options = options
        self._read_options = read_options
        self._storage_options = storage_options
        self._store: vc.Store | None = None
        self._checkpointer: vc.Checkpointer | None = None
        self._step = 0

    def checkpointer(self, folder: Path) -> vc.Checkpointer:
        """Return the checkpointer, which stays on the first folder that it is given."""
        if self._checkpointer is None:
            self._store = vc.open_store(folder, storage_options=self._storage_options)
            self._checkpointer = vc.Checkpointer(
                self._store, RUN, options=self._options, read_options=self._read_options
            )
        return self._checkpointer

    def save(self, state: State, folder: Path) -> dict[str, float]:
        """Save the next step and wait until it is committed."""
        before = self._counts(folder)
        report = self.checkpointer(folder).save(self._step, dict(state)).result()
        self._step += 1
        return {
            "bytes_written": report.bytes_written,
            "bytes_deduplicated": report.bytes_deduplicated,
            "chunks": report.chunks,
            "requests": (self._counts(folder) - before).num_requests,
            **{f"{phase}_seconds": seconds for phase, seconds in report.seconds.items() if phase != "total"},
        }

    def load(self, state: State, folder: Path) -> dict[str, float]:
        """Load the newest step, every byte verified."""
        before = self._counts(folder)
        report = self.checkpointer(folder).load(dict(state))
        found = self._counts(folder) - before
        return {"bytes_read": found.down_bytes, "requests": found.num_requests, "chunks": report.chunks}

    def discard(self, folder: Path) -> None:
        """Delete all steps but the newest, and what only they needed."""
        del folder
        store = self._opened
        for snapshot in store.snapshots(RUN)[:-1]:
            store.delete(RUN, snapshot.step)
        store.gc(0)

    def close(self) -> None:
        """End the checkpointer and close the store."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._opened.close()
            self._checkpointer = self._store = None

    @property
    def _opened(self) -> vc.Store:
        assert self._store is not None, "nothing was saved or loaded"  # noqa: S101 -- a mistake of the benchmark
        return self._store

    def _counts(self, folder: Path) -> Counts:
        self.checkpointer(folder)
        counts = self._opened.counts
        assert counts is not None, "the store does not count"  # noqa: S101 -- likewise
        return counts


class Raw(Side):
    """The floor: the tensors' memory to one file with ``write`` and ``fsync``, and back with ``readinto``."""

    name = "raw file"

    def save(self, state: State, folder: Path) -> dict[str, float]:
        """Write and sync."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "data").open("wb", buffering=0) as file:
            for tensor in state.values():
                memory = _memory(tensor)
                while memory:
                    memory = memory[file.write(memory) :]
            os.fsync(file.fileno())
        _sync_folder(folder)
        return {}

    def load(self, state: State, folder: Path) -> dict[str, float]:
        """Read into the tensors."""
        with (folder / "data").open("rb", buffering=0) as file:
            for tensor in state.values():
                memory = _memory(tensor)
                while memory:
                    memory = memory[file.readinto(memory) :]
        return {}


class TorchSave(Side):
    """``torch.save`` and ``torch.load(mmap=False)`` with a copy into place; synced, or nothing would be durable."""

    name = "torch.save"

    def save(self, state: State, folder: Path) -> dict[str, float]:
        """Save to one file and sync it."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "state.pt")
        _sync(folder / "state.pt")
        return {}

    def load(self, state: State, folder: Path) -> dict[str, float]:
        """Load the file and copy."""
        _copy(torch.load(folder / "state.pt", mmap=False, weights_only=True), state)
        return {}


class Safetensors(Side):
    """``safetensors.torch.save_file`` and ``load_file`` with a copy into place; synced."""

    name = "safetensors"

    def save(self, state: State, folder: Path) -> dict[str, float]:
        """Save to one file and sync it."""
        from safetensors.torch import save_file  # noqa: PLC0415 -- optional

        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / "state.safetensors")
        _sync(folder / "state.safetensors")
        return {}

    def load(self, state: State, folder: Path) -> dict[str, float]:
        """Load the file and copy."""
        from safetensors.torch import load_file  # noqa: PLC0415 -- optional

        _copy(load_file(folder / "state.safetensors"), state)
        return {}


class Dcp(Side):
    """``torch.distributed.checkpoint`` with its file system reader and writer."""

    def __init__(self, name: str = DCP, **options: Any) -> None:
        self.name = name
        self._options = options

    def save(self, state: State, folder: Path) -> dict[str, float]:
        """Save to a folder."""
        with quiet():
            dcp.save(state, storage_writer=FileSystemWriter(folder, **self._options))
        return {}

    def load(self, state: State, folder: Path) -> dict[str, float]:
        """Load into place."""
        reader = CountingReader(folder)
        with quiet():
            dcp.load(state, storage_reader=reader)
        return reader.counters()


class CountingReader(FileSystemReader):
    """DCP's reader, with a count of the bytes that it reads from files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _CountingFiles()

    def counters(self) -> dict[str, float]:
        """Return what was read."""
        return {"bytes_read": self.fs.bytes_read, "requests": self.fs.num_reads}


class _CountingFiles(FileSystem):
    def __init__(self) -> None:
        self.bytes_read = 0
        self.num_reads = 0

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield _CountingStream(stream, self) if "r" in mode else stream


class _CountingStream:
    """A file whose reads are counted."""

    def __init__(self, stream: Any, counts: _CountingFiles) -> None:
        self._stream = stream
        self._counts = counts

    def read(self, *arguments: Any) -> bytes:
        """Read, and count."""
        data: bytes = self._stream.read(*arguments)
        self._count(len(data))
        return data

    def readline(self, *arguments: Any) -> bytes:
        """Read a line, and count."""
        data: bytes = self._stream.readline(*arguments)
        self._count(len(data))
        return data

    def readinto(self, memory: Any) -> int:
        """Read, and count."""
        length: int = self._stream.readinto(memory)
        self._count(length)
        return length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _count(self, num_bytes: int) -> None:
        self._counts.bytes_read += num_bytes
        self._counts.num_reads += 1


def savers(*, durable_only: bool = False) -> list[Side]:
    """Return all sides that save."""
    sides: list[Side] = [Ours(), Raw(), Dcp(), TorchSave()]
    if not durable_only:
        sides += [
            Ours(f"{OURS}, not synced", storage_options={"durable": False}),
            Dcp(f"{DCP}, not synced", sync_files=False),
            Dcp(f"{DCP}, 2 threads", thread_count=2),
        ]
    if _has("safetensors"):
        sides.append(Safetensors())
    return sides


def loaders() -> list[Side]:
    """Return all sides that load."""
    sides: list[Side] = [Ours(), Raw(), Dcp(), TorchSave()]
    if _has("safetensors"):
        sides.append(Safetensors())
    return sides


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep a peer's warnings to itself: that it runs without a process group is what is asked of it here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _memory(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _copy(source: Mapping[str, torch.Tensor], target: State) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
