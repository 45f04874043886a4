"""Snapshots of a store as sources: ``URL#run@step``, ``URL#run@tag`` or, for the newest, ``URL#run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vescale_ckpt.interop.foreign.remote_files import RemoteFiles
from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor
from vescale_ckpt.state.build import restore_tree
from vescale_ckpt.state.leaf import LeafKind
from vescale_ckpt.state.tree import ValueNode, fqn, walk
from vescale_ckpt.store import open_store
from vescale_storage.digest import digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.state.tree import Key
    from vescale_ckpt.store import Store

MARK = "#"


class NativeSource(ForeignSnapshot):
    """A snapshot of a store under the interface of foreign ones; every byte read is verified."""

    format: ClassVar[str] = "vescale"

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(RemoteFiles(store.backend))
        self._store = store
        self._snapshot = store[name]
        self._url = f"{store.url}{MARK}{self._snapshot.name}"
        found = self._snapshot.tensors()
        arrays = {name: info for name, info in found.items() if info.kind in {LeafKind.TENSOR, LeafKind.NUMPY}}
        self._tensors = {
            name: ForeignTensor(
                name, info.dtype, info.shape, info.alias_of if info.alias_of in arrays else None, info.path
            )
            for name, info in arrays.items()
        }
        self._notes = tuple(f"{name}: bytes, left out" for name in found if name not in arrays)
        self._paths = {
            fqn(path): path for path, node in walk(self._snapshot.manifest.tree) if isinstance(node, ValueNode)
        }

    @property
    def url(self) -> str:
        """Where it is."""
        return self._url

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    @property
    def values(self) -> Mapping[str, Any]:
        """Plain values by dotted name, one by one: containers are taken apart."""
        tree = {fqn(path): node for path, node in walk(self._snapshot.manifest.tree) if isinstance(node, ValueNode)}
        return {name: restore_tree(node, _none, _none) for name, node in tree.items()}

    @property
    def value_paths(self) -> Mapping[str, tuple[Key, ...]]:
        """Where plain values lie in the state."""
        return self._paths

    @property
    def notes(self) -> tuple[str, ...]:
        """What is left out."""
        return self._notes

    def fingerprint(self) -> bytes:
        """Return the digest of the manifest, which names every byte by its content."""
        return digest(self._snapshot.ref.manifest.encode())

    def _fill(self, tensor: ForeignTensor, box: Box, out: torch.Tensor) -> None:
        out.copy_(self._snapshot.read(tensor.path, box))

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def _none(*_: Any) -> None:
    """Stand for what a plain value does not hold."""


def open_native(url: str, storage_options: Mapping[str, Any] | None = None) -> NativeSource:
    """Return a snapshot of a store.

    Raises:
        StoreNotFoundError, SnapshotNotFoundError: it is not there.
        StorageError: the place cannot be reached.
    """
    place, _, name = url.rpartition(MARK)
    store = open_store(place, storage_options=storage_options, create=False)
    try:
        return NativeSource(store, name)
    except BaseException:
        store.close()
        raise
