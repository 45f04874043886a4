"""What a save or a load of ``vescale_ckpt`` took, as spans: made from the seconds that their reports carry by phase.

The checkpoint packages know nothing of timelines; their reports know how long each phase took, and the order of the
phases is fixed. So the caller notes when it called, and this puts the phases one behind the other from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_train.timeline.span import Kind, Span

if TYPE_CHECKING:
    from collections.abc import Mapping

_CALLER, _STAGING, _BACKGROUND = "cpu", "checkpoint staging", "checkpoint background"

_SAVE_PHASES = (
    ("plan", "", _CALLER),
    ("stage", "plan", _CALLER),
    ("stage_overlapped", "stage", _STAGING),
    ("write", "plan", _BACKGROUND),
    ("commit", "write", _BACKGROUND),
    ("retain", "commit", _BACKGROUND),
)
"""Phase, the phase at whose end it begins, and what runs it. Writing begins with the first part that is staged."""

_LOAD_PHASES = (
    ("open", "", _CALLER),
    ("plan", "open", _CALLER),
    ("read", "plan", _CALLER),
    ("finish", "read", _CALLER),
)


def save_spans(seconds: Mapping[str, float], *, start_ns: int, rank: int, step: int) -> list[Span]:
    """Return the phases of a save.

    Args:
        seconds: of the save's report (``SaveReport.seconds``).
        start_ns: when ``Checkpointer.save`` was called, by ``time.monotonic_ns``.
        rank: this rank.
        step: the training step.
    """
    return _spans("save", _SAVE_PHASES, seconds, start_ns, {"rank": rank, "step": step})


def load_spans(seconds: Mapping[str, float], *, start_ns: int, rank: int, step: int) -> list[Span]:
    """Return the phases of a load (``LoadReport.seconds``), as ``save_spans`` does for a save."""
    return _spans("load", _LOAD_PHASES, seconds, start_ns, {"rank": rank, "step": step})


def _spans(
    verb: str,
    phases: tuple[tuple[str, str, str], ...],
    seconds: Mapping[str, float],
    start_ns: int,
    whose: dict[str, Any],
) -> list[Span]:
    ends = {"": start_ns}
    spans = []
    for phase, after, track in phases:
        begin = ends.get(after, start_ns)
        ends[phase] = begin + round(seconds.get(phase, 0.0) * 1e9)
        if phase in seconds:
            name = f"checkpoint {verb} {phase}"
            spans.append(
                Span(name=name, kind=Kind.CHECKPOINT, start_ns=begin, stop_ns=ends[phase], track=track, **whose)
            )
    return spans
