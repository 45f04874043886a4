"""The checkpointer: saving and loading one run, on however many ranks call it together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.coordinate.group import Group, default_group
from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.execute.read import ReadOptions
from vescale_ckpt.loading.loader import Loader, LoadReport
from vescale_ckpt.retention import RetentionPolicy
from vescale_ckpt.saving.options import SaveOptions
from vescale_ckpt.saving.saver import Saver
from vescale_ckpt.store import Store, open_store
from vescale_storage.keys import MAX_STEP, validate_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from vescale_ckpt.saving.handle import SaveHandle, SaveReport

_DEFAULT_RUN = "checkpoint"


class Checkpointer:
    """Saves and loads the snapshots of one run.

    Every rank of ``process_group`` makes one and calls the same methods in the same order, on its main thread; without
    torch.distributed a single process does. The first save or load makes a gloo group of its own, so that it disturbs
    nobody's collectives.

    Args:
        store: where the snapshots lie.
        run: whose snapshots.
        process_group: the ranks; None means all, or this process alone.
        options: how to save.
        read_options: how to read.
        keep_last: after each save delete all snapshots of this run but so many of the highest steps and of the last
            committed ones; None deletes nothing. Tagged ones stay. The data go with the next ``Store.gc``.
        keep_every: with ``keep_last``, also keep every step that this number divides.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        process_group: dist.ProcessGroup | None = None,
        options: SaveOptions | None = None,
        read_options: ReadOptions | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        self.store = store
        self.run = validate_run(run)
        self.options = options or SaveOptions()
        self._read_options = read_options or ReadOptions()
        self._retention = RetentionPolicy.of(keep_last, keep_every)
        self._process_group = process_group
        self._group_made: Group | None = None
        self._saver_made: Saver | None = None

    def save(
        self,
        step: int,
        state: Any,
        blocking: bool = True,
        base: str | Sequence[str] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Save ``state`` as the snapshot ``run@step``; a step saved again gets a new version.

        Collective: all ranks call it. With ``blocking=False`` it returns when everything is staged, after which the
        caller may change its tensors; the rest happens in the background.

        Args:
            step: 0 or more.
            state: any nesting of dicts, lists and tuples of tensors, DTensors, modules, optimizers, objects with
                ``state_dict``, plain values, ``PerRank`` and ``ShardedView``.
            blocking: whether to return only when the snapshot is committed.
            base: ``run@step``, or several, to deduplicate against beside this run's newest snapshot.
            metadata: JSON values kept with the snapshot.

        Raises:
            InvalidInputError: the state holds what cannot be saved.
            MismatchError: ranks disagree, or an element of a tensor is held by no rank.
            RankFailureError: another rank failed, or an earlier background save did.
            StorageError: the storage failed; earlier snapshots are as they were.
        """
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise InvalidInputError(
                f"cannot save step {step!r} of run '{self.run}': a step is an int of 0 to {MAX_STEP}"
            )
        bases = (base,) if isinstance(base, str) else tuple(base or ())
        return self._saver.save(step, state, blocking=blocking, bases=bases, metadata=dict(metadata or {}))

    def load(
        self,
        state: Any,
        step: int | None = None,
        *,
        cast: bool = False,
        only: Sequence[str] = (),
        ignore: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        verify_first: bool = False,
    ) -> LoadReport:
        """Fill ``state`` in place from ``run@step`` (None: the newest), whatever layout saved it.

        Collective: all ranks call it. Everything is validated first, on all ranks; an error up to then leaves the
        state untouched. Background saves of this checkpointer are waited for.

        Args:
            state: as for ``save``: what is in it is what is loaded.
            step: which snapshot.
            cast: convert where a dtype differs, as ``Tensor.to`` does.
            only: dotted names, prefixes or globs: nothing else is loaded.
            ignore: dotted names, prefixes or globs that are left as they are.
            rename: dotted name in ``state`` -> dotted name in the snapshot.
            verify_first: read everything twice, so that damage in storage is found before anything is touched.

        Raises:
            SnapshotNotFoundError: there is no such snapshot.
            MismatchError: the state and the snapshot do not fit; lists everything, nothing is changed.
            CorruptionError: stored bytes are damaged; says which tensors are filled already.
            RankFailureError: another rank failed.
        """
        if self._saver_made is not None:
            self._group.attempt(f"saving {self.run} in the background", self._saver_made.finish)
        options = RestoreOptions(cast=cast, only=tuple(only), ignore=tuple(ignore), rename=dict(rename or {}))
        loader = Loader(self.store, self._group, self._read_options)
        return loader.load(state, run=self.run, step=step, options=options, verify_first=verify_first)

    def wait(self) -> None:
        """Wait for all background saves and raise the first failure that nobody has seen.

        Raises:
            VeScaleError: why a save failed.
        """
        if self._saver_made is not None:
            self._saver_made.finish()

    def close(self) -> None:
        """Wait for all background saves and release threads, memory and connections; the store stays open."""
        try:
            if self._saver_made is not None:
                try:
                    self._saver_made.finish()
                finally:
                    self._saver_made.close()
                    self._saver_made = None
        finally:
            self._close_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close_group()

    def _close_group(self) -> None:
        if self._group_made is not None:
            self._group_made.close()
            self._group_made = None

    @property
    def _group(self) -> Group:
        if self._group_made is None:
            self._group_made = default_group(self._process_group, self.options.deadline_seconds)
        return self._group_made

    @property
    def _saver(self) -> Saver:
        if self._saver_made is None:
            self._saver_made = Saver(self.store, self.run, self._group, self.options, self._retention)
        return self._saver_made


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SaveReport:
    """Save ``state`` to a store of its own at ``path``; saving there again makes the next version.

    Collective, like ``Checkpointer.save``, and with its errors.
    """
    with (
        _open_together(path, storage_options, process_group, create=True) as store,
        Checkpointer(store, _DEFAULT_RUN, process_group=process_group) as checkpointer,
    ):
        return checkpointer.save(0, state).result()


def load(
    path: str | os.PathLike[str],
    state: Any,
    *,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Fill ``state`` in place from what ``save`` wrote at ``path``.

    Collective, like ``Checkpointer.load``, and with its errors.
    """
    with (
        _open_together(path, storage_options, process_group, create=False) as store,
        Checkpointer(store, _DEFAULT_RUN, process_group=process_group) as checkpointer,
    ):
        return checkpointer.load(state)


def _open_together(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    process_group: dist.ProcessGroup | None,
    *,
    create: bool,
) -> Store:
    """Return the store at ``path``, or raise on all ranks where one of them cannot open it: a folder may be local."""
    group = default_group(process_group, SaveOptions().deadline_seconds)
    try:
        return group.attempt(
            f"opening {os.fspath(path)}",
            lambda: open_store(path, storage_options=storage_options, create=create),
        )
    finally:
        group.close()
