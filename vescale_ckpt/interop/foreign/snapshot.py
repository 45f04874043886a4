"""A foreign snapshot: names, shapes and dtypes without data, and any box of any tensor, whatever the format.

Nothing here, or in any reader built on it, runs what a file says. Sizes are checked against what the files hold before
memory is taken for them.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import torch

from vescale_ckpt.errors import CorruptionError, FormatError, NotFoundError, StorageError
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.interop.foreign.regions import fill_region
from vescale_ckpt.interop.tensorstore.view import tensorstore
from vescale_ckpt.interop.zarr.store import to_zarr
from vescale_ckpt.selection import box_of
from vescale_storage.digest import digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.interop.foreign.files import Files
    from vescale_ckpt.interop.foreign.regions import Chunk
    from vescale_ckpt.state.tree import Key


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """What a checkpoint says of one tensor."""

    name: str
    """Dotted name."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    alias_of: str | None = None
    """The name of the tensor that this one is tied to: same bytes, same shape."""
    path: tuple[Key, ...] = ()
    """Where it lies in the state, key by key; empty where the format has names only."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


_SMALL_BYTES: Final = 64 << 20
_SMALL_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken")


def small_files(files: Files) -> tuple[str, ...]:
    """Return the names of configuration, tokenizer and text files at the top of a folder."""
    return tuple(
        name
        for name, size in files.names().items()
        if "/" not in name and name.endswith(_SMALL_SUFFIXES) and size <= _SMALL_BYTES
    )


class ForeignSnapshot(abc.ABC):
    """One checkpoint of another library; reading it needs neither that library nor a process group."""

    format: ClassVar[str]
    """``safetensors``, ``dcp``, ...: what ``open_foreign`` found it to be."""

    def __init__(self, files: Files) -> None:
        self.files = files

    @property
    def url(self) -> str:
        """Where it is."""
        return self.files.url

    @abc.abstractmethod
    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""

    @abc.abstractmethod
    def _fill(self, tensor: ForeignTensor, box: Box, out: torch.Tensor) -> None:
        """Fill ``out`` with a box, which lies in the tensor and is not empty, of a tensor that is no alias."""

    @property
    def values(self) -> Mapping[str, Any]:
        """What else is stored: plain values (numbers, texts, lists, ...) by dotted name."""
        return {}

    @property
    def value_paths(self) -> Mapping[str, tuple[Key, ...]]:
        """Where plain values lie in the state, key by key, for those that are not at its top."""
        return {}

    def take_overflows(self) -> dict[str, int]:
        """Return, and forget, how many finite values of which tensors became infinite in a cast since the last call."""
        return {}

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the checkpoint says of itself."""
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out or read in a way worth knowing, one line each."""
        return ()

    def carried(self) -> tuple[str, ...]:
        """Return the names of small files beside the tensors that belong to the model (``config.json``, ...)."""
        return ()

    def find(self, name: str) -> ForeignTensor:
        """Return what is known of one tensor.

        Raises:
            NotFoundError: there is none of this name.
        """
        found = self.tensors().get(name)
        if found is None:
            some = ", ".join(repr(other[:80]) for other in list(self.tensors())[:4])
            raise NotFoundError(f"cannot find {name!r} in {self.url}: it has {some or 'no tensors'}, ...", fqn=name)
        return found

    def read(self, name: str, box: Box | slice | tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return a box of a tensor as a new CPU tensor, reading little more than its bytes.

        Args:
            name: dotted name.
            box: a ``Box``, slices of step 1 for the leading dims, or None for the whole tensor.

        Raises:
            NotFoundError: there is no such tensor.
            InvalidInputError: the box is outside the tensor.
            FormatError: the stored bytes are no values of its dtype.
            CorruptionError: they are damaged, or not all of them are there.
            StorageError: they cannot be read, or memory does not suffice.
        """
        tensor = self.find(name)
        if tensor.alias_of is not None:
            tensor = self.find(tensor.alias_of)
        wanted = box_of(box, tensor.shape, name)
        try:
            out = torch.empty(wanted.shape, dtype=tensor.dtype)
        except (RuntimeError, MemoryError) as error:
            num_bytes = wanted.volume * tensor.dtype.itemsize
            raise StorageError(
                f"cannot read {name!r} of {self.url}: no memory for {num_bytes} bytes; read a smaller box", fqn=name
            ) from error
        if wanted.volume:
            self._fill(tensor, wanted, out)
        if tensor.dtype is torch.bool and out.numel() and int(out.view(torch.uint8).max()) > 1:
            raise FormatError(f"cannot read {name!r} of {self.url}: it holds bytes that are no booleans", fqn=name)
        return out

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name, in this process's memory; tied names share theirs."""
        found = {name: self.read(name) for name, tensor in self.tensors().items() if tensor.alias_of is None}
        return {name: found[tensor.alias_of or name] for name, tensor in self.tensors().items()}

    def to_zarr(self, *, extensions: bool = False) -> Any:
        """Return a read-only zarr v3 store over this, lazy; see ``vescale_ckpt.interop.zarr.store``.

        Raises:
            ConfigError: zarr is not installed.
        """
        return to_zarr(self, extensions=extensions)

    def tensorstore(self, path: str) -> Any:
        """Return one tensor as a lazy, read-only TensorStore.

        Raises:
            NotFoundError: there is none of this name.
            InvalidInputError: TensorStore has no such dtype.
            ConfigError: TensorStore is not installed.
        """
        return tensorstore(self, path)

    def fingerprint(self) -> bytes:
        """Return 32 bytes that change when the checkpoint does: structure, and size, time and samples of every file."""
        parts = [f"{self.format}\n".encode()]
        parts += [
            f"{t.name!r} {t.dtype} {t.shape} {t.alias_of!r}\n".encode(errors="surrogatepass")
            for t in self.tensors().values()
        ]
        parts += [self.files.fingerprint(name) for name in self.files.names()]
        return digest(b"".join(parts))

    def close(self) -> None:
        """Close files and connections; a second call does nothing."""
        self.files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.format} checkpoint at {self.url}: {len(self.tensors())} tensors>"


class RegionSnapshot(ForeignSnapshot):
    """A snapshot whose tensors lie uncompressed in files, each in one or several chunks."""

    @abc.abstractmethod
    def _chunks(self, tensor: ForeignTensor) -> Sequence[Chunk]:
        """Return the chunks of a tensor that is no alias, in no particular order."""

    def _fill(self, tensor: ForeignTensor, box: Box, out: torch.Tensor) -> None:
        hit = [(chunk, common) for chunk in self._chunks(tensor) if (common := chunk.box.intersect(box)) is not None]
        report = check_cover(box.shape, [common.relative_to(box) for _, common in hit])
        if not report.ok:
            what = f"{report.missing[0].shifted(box.offset)} is in no file" if report.missing else "chunks overlap"
            raise CorruptionError(
                f"cannot read {box} of {tensor.name!r} in {self.url}: {what}", fqn=tensor.name, box=box
            )
        for chunk, common in hit:
            inside = common.relative_to(chunk.box)
            fill_region(self.files, chunk.open(), inside, out[common.relative_to(box).slices])
