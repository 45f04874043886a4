"""Target: a snapshot of a store, ``URL#run@step``.

A save wants its tensors in memory; those of a checkpoint that is larger are put into a file that is mapped, and this
process lets go of the file's pages while it goes on. The snapshot is committed at the end, as every save is: before
that nothing is visible.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.coordinate.group import SoloGroup
from vescale_ckpt.errors import AlreadyExistsError, ConfigError
from vescale_ckpt.interop.convert.native import MARK
from vescale_ckpt.interop.safetensors.bands import bands
from vescale_ckpt.saving.options import SaveOptions
from vescale_ckpt.saving.saver import Saver
from vescale_ckpt.stage.mapped import MappedMemory
from vescale_ckpt.stage.raw import as_integers
from vescale_ckpt.store import open_store
from vescale_storage import refs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from vescale_ckpt.interop.convert.options import ConvertOptions
    from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot
    from vescale_ckpt.saving.handle import SaveReport
    from vescale_ckpt.state.tree import Key

_LET_GO_SECONDS: Final = 0.05
_SMALLEST_BUDGET_BYTES: Final = 32 << 20
DEFAULT_SUBTREE: Final = "model"


def save_to_store(
    source: ForeignSnapshot,
    target: str,
    storage_options: Mapping[str, Any] | None,
    options: ConvertOptions,
    advance: Callable[[int], None],
) -> SaveReport:
    """Save a checkpoint as a snapshot and return what the save did.

    Names without nesting come below ``model``; a nesting that the checkpoint has stays. Ties are stored once.

    Raises:
        ConfigError: the target names no run and step.
        AlreadyExistsError: the snapshot is there.
        CorruptionError, StorageError: the source is damaged, or one of the two places failed; nothing is committed.
    """
    url, _, name = target.rpartition(MARK)
    wanted = refs.parse_name(name)
    if wanted.step is None:
        raise ConfigError(f"cannot convert to {target}: name run and step, as in {url}{MARK}{wanted.run}@0")
    with open_store(url, storage_options=storage_options) as store:
        found = store.newest(wanted.run)
        if found is not None and any(info.step == wanted.step for info in store.snapshots(wanted.run)):
            raise AlreadyExistsError(f"cannot convert to {target}: the snapshot is there already", snapshot=name)
        with _mapped(source) as memory:
            tensors = {name: _read(source, name, memory, options, advance) for name in _owners(source)}
            budget = max(_SMALLEST_BUDGET_BYTES, 2 * options.part_bytes)
            saver = Saver(store, wanted.run, SoloGroup(), SaveOptions(host_budget_bytes=budget))
            try:
                metadata = {"converted_from": source.url, "format": source.format}
                with _letting_go(memory):
                    handle = saver.save(
                        wanted.step, _state(source, tensors), blocking=True, bases=(), metadata=metadata
                    )
                return handle.result()
            finally:
                saver.close()


def _owners(source: ForeignSnapshot) -> list[str]:
    return [name for name, tensor in source.tensors().items() if tensor.alias_of is None]


@contextlib.contextmanager
def _mapped(source: ForeignSnapshot) -> Iterator[MappedMemory]:
    tensors = source.tensors()
    with tempfile.TemporaryDirectory(prefix="vescale-convert-") as folder:
        yield MappedMemory(folder, [tensors[name].num_bytes for name in _owners(source)])


@contextlib.contextmanager
def _letting_go(memory: MappedMemory) -> Iterator[None]:
    """Keep the mapped file's pages out of this process while the block runs."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_LET_GO_SECONDS):
            memory.let_go()

    thread = threading.Thread(target=run, name="vescale-convert", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read(
    source: ForeignSnapshot, name: str, memory: MappedMemory, options: ConvertOptions, advance: Callable[[int], None]
) -> torch.Tensor:
    tensor = source.tensors()[name]
    out = memory.empty(tensor.shape, tensor.dtype)
    tile = tuple(max(1, size) for size in tensor.shape)
    for band in bands(tensor.shape, tile, tensor.dtype.itemsize, options.part_bytes):
        place = as_integers(out)[band.slices] if band.shape else as_integers(out)
        place.copy_(as_integers(source.read(name, band)))
        advance(band.volume * tensor.dtype.itemsize)
        memory.let_go()
    return out


def _state(source: ForeignSnapshot, tensors: Mapping[str, torch.Tensor]) -> dict[Key, Any]:
    found = source.tensors()
    prefix = () if any(tensor.path for tensor in found.values()) else (DEFAULT_SUBTREE,)
    state: dict[Key, Any] = {}
    for name, tensor in found.items():
        _put(state, (*prefix, *(tensor.path or (name,))), tensors[tensor.alias_of or name])
    for name, value in source.values.items():
        _put(state, source.value_paths.get(name, (name,)), value)
    return state


def _put(state: dict[Key, Any], path: tuple[Key, ...], value: Any) -> None:
    at = state
    for key in path[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            raise ConfigError(f"cannot nest {path!r}: {key!r} is a value already")
    at[path[-1]] = value
