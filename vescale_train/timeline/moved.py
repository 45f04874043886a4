"""Spans brought together: onto one clock, and from all ranks."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from vescale_ckpt.coordinate.group import default_group
from vescale_train.timeline.perfetto import event_of, span_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from vescale_train.timeline.clock import Alignment
    from vescale_train.timeline.span import Span

DEADLINE_SECONDS = 600.0


def on_reference(span: Span, alignment: Alignment) -> Span:
    """Return a span of this rank's clock on the clock of rank 0."""
    start = alignment.to_reference(span.start_ns)
    return dataclasses.replace(span, start_ns=start, stop_ns=max(start, alignment.to_reference(span.stop_ns)))


def gather_spans(spans: Sequence[Span], group: dist.ProcessGroup | None = None) -> list[Span]:
    """Return the spans of all ranks, by rank, on every rank; collective.

    Args:
        spans: this rank's, on the shared clock: what ``flush`` returned.
        group: the ranks; None: all, or this process alone.
    """
    ranks = default_group(group, DEADLINE_SECONDS)
    try:
        parts = ranks.all_gather(json.dumps([event_of(span, 0) for span in spans]).encode())
    finally:
        ranks.close()
    return [span_of(event) for part in parts for event in json.loads(part)]
