"""The demo's training runs: what is planned, how it is started and watched, and what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diary import read_diary
from interrupt import Wreck, kill_during_save
from launch import Command, Job, JobError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    import vescale_ckpt as vc

RUN = "gpt"
"""The run's name in the store."""
SIZE = "small"
NUM_STEPS = 60
SAVE_EVERY = 10
KILL_AFTER = 20
"""The first save after this step is the one to be killed."""
JOB_TIMEOUT_SECONDS = 900.0
"""Many times what a run takes: only a job that hangs should meet it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One training run to start."""

    name: str
    dp: int = 1
    tp: int = 1
    seed: int
    save_every: int = 0
    resume: str | None = None
    """A step, or ``newest``."""

    @property
    def layout(self) -> str:
        """The layout in words."""
        axes = [f"{axis} {size}" for axis, size in (("dp", self.dp), ("tp", self.tp)) if size > 1]
        return " x ".join(axes) or "one rank"

    @property
    def num_ranks(self) -> int:
        """How many processes it takes."""
        return self.dp * self.tp


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a plan."""

    plan: Plan
    events: list[dict[str, Any]]
    """Its diary."""
    logits: Path
    """Where it left the last model's answers, if it came so far."""
    wreck: Wreck | None = None
    """What its killing left in the store."""

    @property
    def losses(self) -> dict[int, float]:
        """Step -> loss over the whole batch."""
        return {event["step"]: event["loss"] for event in self.events if event["event"] == "loss"}

    def digests(self, step: int) -> dict[str, str]:
        """Return name -> digest of all tensors as its ranks held them after ``step``."""
        found: dict[str, str] = next(
            event["digests"] for event in self.events if event["event"] == "state" and event["step"] == step
        )
        return found

    @property
    def first_step(self) -> int:
        """The step that it started from: 0 without a checkpoint."""
        return min(self.losses) - 1

    @property
    def last_step(self) -> int:
        """The last step that it made."""
        return max(self.losses)

    @property
    def lost_step(self) -> int:
        """The step whose save was cut off by the kill."""
        if self.wreck is None:
            raise ValueError(f"the run '{self.plan.name}' was not killed")
        return self.wreck.newest_step + SAVE_EVERY

    @property
    def resumed(self) -> dict[str, Any] | None:
        """What its load reported: step; bytes needed, read and exchanged, over all ranks."""
        return next((event for event in self.events if event["event"] == "resumed"), None)

    def differences(self, other: Run) -> dict[int, float]:
        """Return step -> distance of the losses, for the steps that both made."""
        theirs = other.losses
        return {step: abs(loss - theirs[step]) for step, loss in self.losses.items() if step in theirs}


@dataclass
class Site:
    """Where runs are made."""

    store: vc.Store
    folder: Path
    console: Console
    _began: float = field(default_factory=time.monotonic)

    def train(self, plan: Plan) -> Run:
        """Carry out a plan to its last step."""
        with self.console.status("") as status, Job(self._command(plan)) as job:
            job.wait(lambda: self._watch(plan, status))
        run = self._run(plan)
        self.say(f"{plan.name}, {plan.layout}: trained to step {run.last_step}, loss {run.losses[run.last_step]:.3f}")
        return run

    def train_and_kill(self, plan: Plan) -> Run:
        """Carry out a plan until one of its saves can be killed half done.

        Raises:
            JobError: it ended before that.
        """
        with self.console.status("") as status, Job(self._command(plan)) as job:
            wreck = kill_during_save(
                job, self.store, RUN, after_step=KILL_AFTER, watch=lambda: self._watch(plan, status)
            )
        if wreck is None:
            raise JobError("the job ended before one of its saves could be caught half done")
        run = self._run(plan, wreck)
        self.say(f"{plan.name}, {plan.layout}: killed in the middle of the save of step {run.lost_step}")
        return run

    def say(self, what: str) -> None:
        """Print a line with the time since the start."""
        self.console.print(f"[dim]{time.monotonic() - self._began:4.0f} s[/]  {what}", highlight=False)

    def _command(self, plan: Plan) -> Command:
        settings: dict[str, Any] = {
            "store": self.store.url,
            "run": RUN,
            "size": SIZE,
            "dp": plan.dp,
            "tp": plan.tp,
            "seed": plan.seed,
            "steps": NUM_STEPS,
            "save-every": plan.save_every,
            "diary": self._folder(plan) / "diary.jsonl",
            "logits": self._folder(plan) / "logits.pt",
        }
        if plan.resume is not None:
            settings["resume"] = plan.resume
        return Command(
            script=Path(__file__).with_name("train.py"),
            arguments=tuple(f"--{name}={value}" for name, value in settings.items()),
            num_ranks=plan.num_ranks,
            log_folder=self._folder(plan),
            timeout_seconds=JOB_TIMEOUT_SECONDS,
        )

    def _folder(self, plan: Plan) -> Path:
        return self.folder / "runs" / plan.name.replace(" ", "-")

    def _run(self, plan: Plan, wreck: Wreck | None = None) -> Run:
        events = read_diary(self._folder(plan) / "diary.jsonl")
        return Run(plan=plan, events=events, logits=self._folder(plan) / "logits.pt", wreck=wreck)

    def _watch(self, plan: Plan, status: Status) -> None:
        losses = self._run(plan).losses
        step = max(losses, default=0)
        doing = f"step {step} of {NUM_STEPS}, loss {losses[step]:.3f}" if losses else "starting"
        status.update(f"{plan.name}, {plan.layout}: {doing}")
