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
from safetensors.torch import load_model
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
    num_parts = killed.wreck.num_objects if killed.wreck is not None else 0
    steps = [info.step for info in store.snapshots(RUN)]
    return Check(
        claim=f"the kill during save {killed.lost_step} leaves no half checkpoint",
        passed=num_parts > 0 and killed.lost_step not in steps,
        found=f"{num_parts} of its files, newest checkpoint: {steps[-1]}",
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
    """A run's losses are those of the undisturbed run."""
    same_layout = run.plan.layout == reference.plan.layout
    tolerance = 0.0 if same_layout else LOSS_TOLERANCE
    differences = run.differences(reference)
    worst = max(differences.values())
    return Check(
        claim=f"{run.plan.name} learns as {reference.plan.name}" + ("" if same_layout else f", within {tolerance:.0e}"),
        passed=worst <= tolerance and len(differences) == len(run.losses),
        found=f"{len(differences)} losses, " + (f"at most {worst:.1e} apart" if worst else "equal to the bit"),
    )


def check_steps(store: vc.Store) -> Check:
    """All saves but the killed one, and the one made again, are in the store."""
    steps = [info.step for info in store.snapshots(RUN)]
    expected = list(range(SAVE_EVERY, NUM_STEPS + 1, SAVE_EVERY))
    return Check(
        claim="the next saves work, from another layout",
        passed=steps == expected,
        found=f"steps {', '.join(map(str, steps))}",
    )


def check_verify(url: str) -> Check:
    """Every byte of every checkpoint has the digest that was noted for it."""
    done = run_cli("verify", url)
    found = "all bytes read, all as written" if done.returncode == 0 else _last_line(done)
    return Check(claim="`vescale-ckpt verify` finds nothing wrong", passed=done.returncode == 0, found=found)


def check_export(store: vc.Store, trained: Run, folder: Path) -> list[Check]:
    """Exported weights, read without this library, are the model."""
    step = trained.last_step
    done = run_cli("export", store.url, f"{RUN}@{step}", str(folder))
    if done.returncode:
        return [Check(claim="`vescale-ckpt export` writes safetensors", passed=False, found=_last_line(done))]
    exported, stored = (GPT(GPTConfig.of_size(SIZE, VOCAB_SIZE)) for _ in range(2))
    load_model(exported, folder / "model.safetensors")
    snapshot = store[f"{RUN}@{step}"]
    stored.load_state_dict({name: snapshot.read(f"model.{name}") for name in stored.state_dict()})
    corpus = Corpus(standard_library_text())
    from_export, from_store = probe(exported, corpus), probe(stored, corpus)
    from_ranks = torch.load(trained.logits, weights_only=True)
    equal = torch.equal(from_export, from_store)
    worst = (from_export - from_ranks).abs().max().item()
    return [
        Check(
            claim="exported safetensors give the checkpoint's logits",
            passed=equal,
            found=f"{from_export.numel():,} logits, {'equal to the bit' if equal else 'not equal'}",
        ),
        Check(
            claim=f"and those of the {trained.plan.num_ranks} ranks that trained, within {LOGITS_TOLERANCE:.0e}",
            passed=worst <= LOGITS_TOLERANCE,
            found=f"at most {worst:.1e} apart",
        ),
    ]


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the ``vescale-ckpt`` command and return what came of it."""
    command = [sys.executable, "-m", "vescale_tools.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)  # noqa: S603


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return f"exit code {done.returncode}: {lines[-1] if lines else 'nothing printed'}"
