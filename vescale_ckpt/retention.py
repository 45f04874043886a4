"""Retention: which snapshots of a run stay, as a rule over numbers and times. Pure: no storage, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

SUPERSEDED_SECONDS = 3600.0
"""How long an older version of a step stays after a newer one is there: ranks may still be looking for their commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """What stays; everything else may be deleted. Tagged snapshots and the newest always stay."""

    keep_last: int
    """How many of the highest steps, and as many of those that were committed last. They are the same unless a run was
    set back to an earlier step; then neither what it has just saved nor what it came from is lost."""
    keep_every: int | None = None
    """Also every step that this number divides."""

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(
                    f"cannot keep snapshots by {name}={value!r}: expected an int of 1 or more; the newest always stays"
                )

    @classmethod
    def of(cls, keep_last: int | None, keep_every: int | None) -> RetentionPolicy | None:
        """Return the policy of these arguments, or None where everything stays.

        Raises:
            ConfigError: a number is out of range, or ``keep_every`` comes alone.
        """
        if keep_last is not None:
            return cls(keep_last=keep_last, keep_every=keep_every)
        if keep_every is not None:
            raise ConfigError(
                f"cannot keep every {keep_every} steps without keep_last: by itself it does not say what may go; pass "
                "keep_last=1 to keep only the newest beside them"
            )
        return None


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One committed step of a run."""

    step: int
    versions: tuple[int, ...]
    """Ascending; the last one is what readers take."""
    committed_seconds: float
    """When the last version was committed."""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A step that stays, and why."""

    step: int
    reasons: tuple[str, ...]
    """``newest``, ``last``, ``every``, ``asked for``, ``tagged <name>``."""


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What pruning a run does; printing it is the dry run."""

    run: str
    kept: tuple[Kept, ...]
    """Ascending."""
    deleted: tuple[int, ...]
    """Steps, ascending."""
    superseded: tuple[tuple[int, int], ...]
    """(step, version) of older versions of steps that stay."""


def plan_prune(
    run: str, steps: Sequence[StepInfo], policy: RetentionPolicy, *, now: float, keep_steps: Collection[int] = ()
) -> PrunePlan:
    """Return what to delete of a run.

    Args:
        run: its name.
        steps: all of its committed steps, in any order; of this run alone.
        policy: what stays.
        now: seconds since the epoch, by the clock that dated the commits.
        keep_steps: stay as well, e.g. the one that was just committed.
    """
    if not steps:
        return PrunePlan(run, (), (), ())
    ordered = sorted(steps, key=lambda info: info.step)
    highest = {info.step for info in ordered[-policy.keep_last :]}
    latest = sorted(ordered, key=lambda info: (info.committed_seconds, info.step))[-policy.keep_last :]
    last = highest | {info.step for info in latest}
    kept, deleted = [], []
    for info in ordered:
        reasons = [
            *(["newest"] if info is ordered[-1] else []),
            *(["last"] if info.step in last else []),
            *(["every"] if policy.keep_every is not None and info.step % policy.keep_every == 0 else []),
            *(["asked for"] if info.step in keep_steps else []),
            *(f"tagged {tag}" for tag in info.tags),
        ]
        if reasons:
            kept.append(Kept(info.step, tuple(reasons)))
        else:
            deleted.append(info.step)
    staying = {each.step for each in kept}
    superseded = [
        (info.step, version)
        for info in ordered
        # Versions of a tagged step stay together: the tag may be on any of them.
        if info.step in staying and not info.tags and info.committed_seconds <= now - SUPERSEDED_SECONDS
        for version in info.versions[:-1]
    ]
    return PrunePlan(run, tuple(kept), tuple(deleted), tuple(superseded))
