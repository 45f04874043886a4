"""Checkpoints of a training: what must survive, saved every few steps behind it, and resumed on any mesh."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

import vescale_ckpt as vc
from vescale_ckpt.errors import ConfigError
from vescale_train.dmodule import attached
from vescale_train.engine.progress import progress_of
from vescale_train.mesh import names
from vescale_train.timeline import add_span, current, load_spans, save_spans

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import nn

_log = logging.getLogger(__name__)

_OWN = frozenset({"model", "optimizer", "progress", "rng"})


class Checkpoint:
    """Saves a training every few steps in the background, and resumes it on whatever mesh there is now.

    Beside the model and the optimizer it keeps the step, the random state of each rank (which another number of ranks
    does not take over), and whatever it is given here: data, a scheduler, a dict of plain values.

    Args:
        store: an open store, or where one is or shall be.
        run: the name of this training in the store.
        every: steps between two saves of ``maybe_save``.
        keep_last: see ``vescale_ckpt.Checkpointer``.
        keep_every: likewise.
        options: how to save.
        state: more to keep, by name: ``data=...``, ``scheduler=...``.

    Raises:
        ConfigError: ``every`` is less than 1, or a name is taken.
    """

    def __init__(
        self,
        store: vc.Store | str | os.PathLike[str],
        run: str = "train",
        *,
        every: int = 1000,
        keep_last: int | None = None,
        keep_every: int | None = None,
        options: vc.SaveOptions | None = None,
        **state: Any,
    ) -> None:
        if every < 1:
            raise ConfigError(f"cannot save every {every} steps: it is at least 1")
        taken = sorted(_OWN & set(state))
        if taken:
            raise ConfigError(f"a checkpoint keeps {', '.join(taken)} by itself: give what you add another name")
        self._owns_store = not isinstance(store, vc.Store)
        self.store = store if isinstance(store, vc.Store) else vc.open_store(store)
        self.every = every
        self._more = state
        self._checkpointer = vc.Checkpointer(
            self.store, run, options=options, keep_last=keep_last, keep_every=keep_every
        )
        self._under_way: list[tuple[vc.SaveHandle, int]] = []

    def maybe_save(self, model: nn.Module, optim: torch.optim.Optimizer) -> vc.SaveHandle | None:
        """Save in the background if the model's step is one of every so many; collective then.

        Call it after each ``step``. Raises what an earlier save failed of.
        """
        if progress_of(model).step % self.every:
            self._note_ended()
            return None
        return self.save(model, optim, blocking=False)

    def save(self, model: nn.Module, optim: torch.optim.Optimizer, *, blocking: bool = True) -> vc.SaveHandle:
        """Save now, as the snapshot of the model's step; collective.

        Raises:
            VeScaleError: see ``vescale_ckpt.Checkpointer.save``.
        """
        self._note_ended()
        step, began = progress_of(model).step, time.monotonic_ns()
        handle = self._checkpointer.save(
            step, self._state(model, optim), blocking=blocking, metadata={"mesh": _mesh_sizes(model)}
        )
        self._under_way.append((handle, began))
        self._note_ended()
        return handle

    def resume(
        self, model: nn.Module, optim: torch.optim.Optimizer, *, step: int | None = None, **load_options: Any
    ) -> int:
        """Take all that was kept from a snapshot, whatever mesh saved it, and return its step; collective.

        Args:
            model: laid out in any way.
            optim: likewise; it need not have stepped.
            step: which; None: the newest, and 0 with nothing changed where there is none.
            load_options: see ``vescale_ckpt.Checkpointer.load``.

        Raises:
            SnapshotNotFoundError: there is no snapshot of that step.
            VeScaleError: see ``vescale_ckpt.Checkpointer.load``.
        """
        found = self._find(step)
        if found is None:
            return 0
        state, began = self._state(model, optim), time.monotonic_ns()
        saved_on = self.store[f"{self.run}@{found}"].metadata.get("mesh")
        if saved_on != _mesh_sizes(model):
            _log.info("%s@%d was saved on the mesh %s; each rank keeps its own random state", self.run, found, saved_on)
            load_options["ignore"] = (*load_options.get("ignore", ()), "rng")
        report = self._checkpointer.load(state, step=found, **load_options)
        if "rng" not in load_options.get("ignore", ()):
            _set_random_state(state["rng"].value)
        timers = current()
        if timers is not None:
            for span in load_spans(report.seconds, start_ns=began, rank=timers.recorder.rank, step=found):
                add_span(span)
        return report.step

    @property
    def run(self) -> str:
        """The name of this training in the store."""
        return self._checkpointer.run

    def wait(self) -> None:
        """Wait until all saves have ended.

        Raises:
            VeScaleError: why one failed.
        """
        self._checkpointer.wait()
        self._note_ended()

    def close(self) -> None:
        """Wait for all saves and let everything go.

        Raises:
            VeScaleError: why a save failed.
        """
        try:
            self._checkpointer.close()
        finally:
            self._note_ended()
            if self._owns_store:
                self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._checkpointer.__exit__(kind, *rest)
            if self._owns_store:
                self.store.close()

    def _find(self, step: int | None) -> int | None:
        """Return the step to load, the same on all ranks: another process may save meanwhile."""
        newest = None
        if step is None:
            ref = self.store.newest(self.run)
            newest = None if ref is None else ref.step
        found = [newest if step is None else step]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def _state(self, model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
        own = {"model": model, "optimizer": optim, "progress": progress_of(model)}
        return own | self._more | {"rng": vc.PerRank(_random_state())}

    def _note_ended(self) -> None:
        """Give the phases of saves that have ended to the timeline."""
        ended = [(handle, began) for handle, began in self._under_way if handle.done]
        self._under_way = [one for one in self._under_way if not one[0].done]
        timers = current()
        for handle, began in ended:
            if timers is None or handle.state is not vc.SaveState.COMMITTED:
                continue
            rank = timers.recorder.rank
            for span in save_spans(handle.result().seconds, start_ns=began, rank=rank, step=handle.step):
                add_span(span)


def _mesh_sizes(model: nn.Module) -> dict[str, int]:
    mesh = attached(model).mesh
    return dict(zip(names(mesh), mesh.shape, strict=True))


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
