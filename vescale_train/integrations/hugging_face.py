"""Hugging Face's ``Trainer`` on the store: a callback that saves behind its steps, and a folder to resume from.

    callback = StoreCallback("s3://bucket/checkpoints", run="bert", every=500)
    trainer = Trainer(..., callbacks=[callback])           # save_strategy="no": the store replaces the folders
    trainer.train(resume_from_checkpoint=resume_folder("s3://bucket/checkpoints", "bert", "/tmp/resume"))

The trainer takes up a training only from a folder in its own format, so ``resume_folder`` writes one of a snapshot.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import TrainerCallback

import vescale_ckpt as vc
from vescale_ckpt.errors import ConfigError, FormatError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from transformers import TrainerControl, TrainerState, TrainingArguments


class StoreCallback(TrainerCallback):  # type: ignore[misc]  # untyped base
    """Saves model, optimizer, schedule, progress and random states to a store, in the background.

    Args:
        store: an open store, or where one is or shall be.
        run: the name of this training in the store.
        every: steps between two saves; the last step is saved in any case.
        keep_last: see ``vescale_ckpt.Checkpointer``.
        options: how to save.

    Raises:
        ConfigError: ``every`` is less than 1.
    """

    def __init__(
        self,
        store: vc.Store | str | os.PathLike[str],
        run: str,
        *,
        every: int = 500,
        keep_last: int | None = None,
        options: vc.SaveOptions | None = None,
    ) -> None:
        if every < 1:
            raise ConfigError(f"cannot save every {every} steps: it is at least 1")
        self.store = store if isinstance(store, vc.Store) else vc.open_store(store)
        self.every = every
        self._run = run
        self._settings: dict[str, Any] = {"keep_last": keep_last, "options": options}
        self._checkpointer: vc.Checkpointer | None = None
        self._saved_step = -1

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the interface's
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - likewise
        **parts: Any,
    ) -> None:
        """Save if it is time to."""
        if state.global_step % self.every == 0:
            self._save(state, parts)

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the interface's
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - likewise
        **parts: Any,
    ) -> None:
        """Save the last step, and wait until all is in the store.

        Raises:
            VeScaleError: why a save failed.
        """
        if state.global_step != self._saved_step:
            self._save(state, parts)
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _save(self, state: TrainerState, parts: Mapping[str, Any]) -> None:
        if self._checkpointer is None:  # not before: torch.distributed is initialised by then
            self._checkpointer = vc.Checkpointer(self.store, self._run, **self._settings)
        # accelerate wraps the optimizer and the schedule
        kept = {
            "model": parts["model"],
            "optimizer": getattr(parts["optimizer"], "optimizer", parts["optimizer"]),
            "schedule": getattr(parts["lr_scheduler"], "scheduler", parts["lr_scheduler"]),
            # Floats differ between ranks (losses, speeds); what is resumed from is rank 0's.
            "trainer": vc.PerRank(json.dumps(asdict(state))),
            "random": vc.PerRank(_random_states()),
        }
        self._checkpointer.save(state.global_step, kept, blocking=False)
        self._saved_step = state.global_step


def resume_folder(
    store: vc.Store | str | os.PathLike[str], run: str, folder: str | os.PathLike[str], *, step: int | None = None
) -> str:
    """Write a snapshot as a folder that ``Trainer.train(resume_from_checkpoint=...)`` takes, and return it; collective.

    Rank 0 writes, so the folder must be one that all ranks see.

    Args:
        store: an open store, or where one is.
        run: the name of the training.
        folder: made if it is not there.
        step: which snapshot; None: the newest.

    Raises:
        SnapshotNotFoundError: there is no such snapshot.
        FormatError: it was not saved by a ``StoreCallback``.
    """
    out = Path(folder)
    if not dist.is_initialized() or dist.get_rank() == 0:
        if isinstance(store, vc.Store):
            _write(store, run, step, out)
        else:
            with vc.open_store(store, create=False) as opened:
                _write(opened, run, step, out)
    if dist.is_initialized():
        dist.barrier()
    return str(out)


def _write(store: vc.Store, run: str, step: int | None, out: Path) -> None:
    snapshot = store[run if step is None else f"{run}@{step}"]
    state = snapshot.state_dict()
    missing = sorted({"model", "optimizer", "schedule", "trainer", "random"} - set(state))
    if missing:
        raise FormatError(
            f"cannot make a folder for transformers of {snapshot.name}: it has no {', '.join(missing)}; "
            f"it was not saved by a StoreCallback"
        )
    out.mkdir(parents=True, exist_ok=True)
    torch.save(state["model"], out / "pytorch_model.bin")
    torch.save(_by_index(state["optimizer"]), out / "optimizer.pt")
    torch.save(state["schedule"], out / "scheduler.pt")
    (out / "trainer_state.json").write_text(state["trainer"][0], encoding="utf-8")
    for rank, found in state["random"].items():
        name = "rng_state.pth" if len(state["random"]) == 1 else f"rng_state_{rank}.pth"
        torch.save(_as_transformers(found), out / name)


def _by_index(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by the numbers that torch gives parameters, where the store has names."""
    groups: list[dict[str, Any]] = []
    number_of: dict[str, int] = {}
    for group in optimizer["param_groups"]:
        numbers = []
        for name in group["params"]:
            number_of[name] = len(number_of)
            numbers.append(number_of[name])
        groups.append(dict(group) | {"params": numbers})
    return {"state": {number_of[name]: found for name, found in optimizer["state"].items()}, "param_groups": groups}


def _random_states() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "cpu": torch.get_rng_state(),
    }


def _as_transformers(found: Mapping[str, Any]) -> dict[str, Any]:
    version, words, gauss = found["python"]
    name, keys, *rest = found["numpy"]
    return {
        "python": (version, tuple(words.tolist()), gauss),
        "numpy": (name, keys.numpy().astype(np.uint32), *rest),
        "cpu": found["cpu"],
    }
