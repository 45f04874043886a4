"""What must hold when the runs are over: each function looks at one thing and says what it found."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from corpus import VOCAB_SIZE, Corpus, standard_library_text
from model import GPT, GPTConfig
from runs import NUM_STEPS, RUN, SAVE_EVERY, SIZE
from safetensors.torch import load_file
from train import digest_of, probe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from runs import Run

    import vescale_ckpt as vc

LOSS_TOLERANCE = 1e-5
"""Layouts add the same numbers in another order, which moves the last bits: one bit of a float32 loss near 4 is 5e-7.
Where the layout is the same, nothing may differ."""
LOGITS_TOLERANCE = 1e-4
"""Likewise for single logits, of which some are near 10."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Something that must hold."""

    claim: str
    passed: bool
    found: str


def stored_digests(snapshot: vc.Snapshot) -> dict[str, str]:
    """Return name -> digest of all tensors of model and optimizer, read from the store in this one process."""
    names = [name for name in snapshot.tensors() if name.startswith(("model.", "optimizer."))]
    return {name: digest_of(snapshot.read(name)) for name in names}


def check_killed(killed: Run, store: vc.Store) -> Check:
    """The save that was cut off is not there, whatever of it is."""
    if killed.wreck is None:
        raise ValueError("this run was not killed")
    step = killed.wreck.newest_step + SAVE_EVERY
    steps = [info.step for info in store.snapshots(RUN)]
    return Check(
        claim="killed in the middle of a save, the job leaves no half checkpoint",
        passed=killed.wreck.num_objects > 0 and step not in steps,
        found=f"{killed.wreck.num_objects} objects of step {step} written, newest checkpoint is step {steps[-1]}",
    )


def check_state(run: Run, stored: Mapping[str, str], step: int, claim: str) -> Check:
    """All tensors of all ranks, put together, are those in the store."""
    held = run.digests(step)
    different = sorted(name for name in held.keys() | stored.keys() if held.get(name) != stored.get(name))
    found = f"{len(stored)} tensors, equal to the bit"
    if different:
        found = f"{len(different)} of {len(held.keys() | stored.keys())} tensors differ: {', '.join(different[:3])}"
    return Check(claim=claim, passed=bool(stored) and not different, found=found)


def check_losses(run: Run, reference: Run) -> Check:
    """A run's losses are those of the uninterrupted run."""
    same_layout = run.plan.layout == reference.plan.layout
    tolerance = 0.0 if same_layout else LOSS_TOLERANCE
    differences = run.differences(reference)
    worst = max(differences.values())
    return Check(
        claim=f"{run.plan.name} ({run.plan.layout}) learns as the uninterrupted run does"
        + ("" if same_layout else f", within {tolerance:.0e}"),
        passed=worst <= tolerance and len(differences) == len(run.losses),
        found=f"{len(differences)} losses, differ by at most {worst:.1e}"
        if worst
        else f"{len(differences)} losses, equal to the bit",
    )


def check_steps(store: vc.Store) -> Check:
    """All saves but the killed one, and the one made again, are in the store."""
    steps = [info.step for info in store.snapshots(RUN)]
    expected = list(range(SAVE_EVERY, NUM_STEPS + 1, SAVE_EVERY))
    return Check(
        claim="saving works again after the kill, from another layout",
        passed=steps == expected,
        found=f"checkpoints of steps {', '.join(map(str, steps))}",
    )


def check_verify(url: str) -> Check:
    """Every byte of every checkpoint has the digest that was noted for it."""
    done = run_cli("verify", url)
    found = "all bytes read and as they were written" if done.returncode == 0 else _last_line(done)
    return Check(claim="`vescale-ckpt verify` finds nothing wrong", passed=done.returncode == 0, found=found)


def check_export(store: vc.Store, trained: Run, folder: Path) -> list[Check]:
    """Exported weights, read without this library, are the model."""
    step = trained.last_step
    done = run_cli("export", store.url, f"{RUN}@{step}", str(folder))
    if done.returncode:
        return [Check(claim="`vescale-ckpt export` writes safetensors", passed=False, found=_last_line(done))]
    exported = load_exported(folder)
    snapshot = store[f"{RUN}@{step}"]
    stored = {name: snapshot.read(f"model.{name}") for name in exported}
    corpus = Corpus(standard_library_text())
    from_export, from_store = (probe(_model_with(weights), corpus) for weights in (exported, stored))
    from_ranks = torch.load(trained.logits, weights_only=True)
    worst = (from_export - from_ranks).abs().max().item()
    return [
        Check(
            claim="exported safetensors, in one plain process, give the checkpoint's logits",
            passed=torch.equal(from_export, from_store),
            found=f"{from_export.numel():,} logits, "
            + ("equal to the bit" if torch.equal(from_export, from_store) else "not equal"),
        ),
        Check(
            claim=f"and those of the {trained.plan.num_ranks} ranks that trained them, within {LOGITS_TOLERANCE:.0e}",
            passed=worst <= LOGITS_TOLERANCE,
            found=f"differ by at most {worst:.1e}",
        ),
    ]


def load_exported(folder: Path) -> dict[str, torch.Tensor]:
    """Return the model's weights from a folder of safetensors, by their names in the model."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return {name.removeprefix("model."): weight for name, weight in weights.items() if name.startswith("model.")}


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the ``vescale-ckpt`` command and return what came of it."""
    command = [sys.executable, "-m", "vescale_tools.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)  # noqa: S603


def _model_with(weights: dict[str, torch.Tensor]) -> GPT:
    model = GPT(GPTConfig.of_size(SIZE, VOCAB_SIZE))
    model.load_state_dict(weights)
    return model


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return f"exit code {done.returncode}: {lines[-1] if lines else 'nothing printed'}"
