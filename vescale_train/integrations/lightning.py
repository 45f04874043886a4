"""Lightning on the store: strategies whose checkpoints are snapshots, saved and loaded by all ranks.

    strategy = StoreDDPStrategy(store="s3://bucket/checkpoints", run="gpt")
    trainer = Trainer(strategy=strategy, callbacks=[ModelCheckpoint(...)])
    trainer.fit(model, ckpt_path="last")

The wiring is in the strategy's ``save_checkpoint`` and ``load_checkpoint``, since strategies that shard go past a
``CheckpointIO``. What lies at the path of a checkpoint is a small JSON file that names the snapshot, so paths, ``last``
and ``best_model_path`` mean what they always do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

import vescale_ckpt as vc
from vescale_ckpt.errors import FormatError, InvalidInputError, StateError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch.optim import Optimizer

_FORMAT = "vescale-snapshot"


class KeepsInStore:
    """What makes a strategy keep its checkpoints in a store; to stand before a strategy among a class's bases.

    Args:
        store: an open store, or where one is or shall be.
        run: the name of this training in the store.
        options: how to save.
        args: of the strategy.
        settings: of the strategy.
    """

    def __init__(
        self,
        *args: Any,
        store: vc.Store | str | os.PathLike[str],
        run: str = "lightning",
        options: vc.SaveOptions | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.store = store if isinstance(store, vc.Store) else vc.open_store(store)
        self._run = run
        self._save_options = options
        self._checkpointer_made: vc.Checkpointer | None = None
        self._loaded: vc.Snapshot | None = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the store takes the module itself, and no shard is gathered."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:  # noqa: ARG002 - Lightning's interface
        """Return nothing: the store takes the optimizer itself."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a snapshot of the step, and a small file at ``filepath`` that names it; on all ranks.

        Raises:
            InvalidInputError: there are ``storage_options``: the store was opened with its own.
            VeScaleError: see ``vescale_ckpt.Checkpointer.save``.
        """
        if storage_options is not None:
            raise InvalidInputError("give storage options to vescale_ckpt.open_store, not to save_checkpoint")
        this: Any = self
        # Values are those of rank 0: timers and file names of callbacks may differ from rank to rank.
        values = this.broadcast({key: value for key, value in checkpoint.items() if key != "state_dict"})
        optimizers = this.optimizers if "optimizer_states" in checkpoint else []
        state = {"model": this.lightning_module, "optimizers": optimizers, "lightning": values}
        report = self._checkpointer.save(int(checkpoint["global_step"]), state).result()
        if this.is_global_zero:
            path = Path(filepath)
            path.parent.mkdir(parents=True, exist_ok=True)
            name = f"{report.run}@{report.step}"
            path.write_text(json.dumps({"format": _FORMAT, "store": self.store.url, "snapshot": name}))
        this.barrier()

    def load_checkpoint(
        self,
        checkpoint_path: str | os.PathLike[str],
        weights_only: bool | None = None,  # noqa: ARG002 - nothing but plain values and tensors is ever read
    ) -> dict[str, Any]:
        """Return a checkpoint's values; tensors are loaded when Lightning asks for them, into the shards there.

        Raises:
            FormatError: there is something else at the path.
            MismatchError: it names a snapshot that Lightning did not make.
            InvalidInputError: the snapshot is in another store.
            SnapshotNotFoundError: the snapshot is gone.
        """
        self._loaded = self.store[self._name_at(Path(checkpoint_path))]
        values = _Values()
        self._checkpointer.load({"lightning": values}, step=self._loaded.step, only=["lightning"])
        return values.found | {"state_dict": {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: ARG002 - the snapshot has them
        """Fill the module, whatever layout saved it; all ranks.

        Raises:
            MismatchError: module and snapshot do not fit.
        """
        this: Any = self
        only = ["model"]
        if not strict:
            there = self._snapshot.tensors()
            only = [name for key in this.lightning_module.state_dict() if (name := f"model.{key}") in there]
        self._checkpointer.load({"model": this.lightning_module}, step=self._snapshot.step, only=only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:  # noqa: ARG002 - likewise
        """Fill the optimizers, whatever layout saved them; all ranks.

        Raises:
            MismatchError: optimizers and snapshot do not fit.
        """
        this: Any = self
        state = {"model": this.lightning_module, "optimizers": this.optimizers}
        self._checkpointer.load(state, step=self._snapshot.step, only=["optimizers"])

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete the snapshot that a path names, and the file there; its data go with the store's next collection."""
        this: Any = self
        path = Path(filepath)
        if this.is_global_zero and path.exists():
            run, _, step = self._name_at(path).partition("@")
            self.store.delete(run, int(step))
            path.unlink()

    def teardown(self) -> None:
        """Wait for what is under way."""
        if self._checkpointer_made is not None:
            self._checkpointer_made.close()
            self._checkpointer_made = None
        parent: Any = super()
        parent.teardown()

    @property
    def _checkpointer(self) -> vc.Checkpointer:
        if self._checkpointer_made is None:
            self._checkpointer_made = vc.Checkpointer(self.store, self._run, options=self._save_options)
        return self._checkpointer_made

    @property
    def _snapshot(self) -> vc.Snapshot:
        if self._loaded is None:
            raise StateError("no checkpoint was loaded: call load_checkpoint first")
        return self._loaded

    def _name_at(self, path: Path) -> str:
        """Return the name of the snapshot that a file names.

        Raises:
            FormatError: the file names none.
            InvalidInputError: it names one of another store.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            kind, store, name = found["format"], found["store"], str(found["snapshot"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise FormatError(f"cannot load {path}: it names no snapshot of a store ({error})") from error
        if kind != _FORMAT or store != self.store.url:
            raise InvalidInputError(
                f"cannot load {path}: it names {name} of the store {store}, and this strategy has {self.store.url}"
            )
        return name


class _Values:
    """Whatever values were saved: an object that takes its state as it comes needs no template."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was loaded."""
        return self.found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was saved."""
        self.found = dict(state)


class StoreSingleDeviceStrategy(KeepsInStore, SingleDeviceStrategy):  # type: ignore[misc]  # untyped base
    """One device; checkpoints in a store."""


class StoreDDPStrategy(KeepsInStore, DDPStrategy):  # type: ignore[misc]  # likewise
    """Replicas on several devices; checkpoints in a store, each rank writing its part."""
