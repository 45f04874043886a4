"""How saves are done, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import ConfigError

if TYPE_CHECKING:
    import os

SMALLEST_BUDGET_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How saves are done; the same on all ranks."""

    host_budget_bytes: int | None = None
    """Bound of host memory beyond the state itself, at least 32 MiB. None: staging may hold this rank's whole share, so
    that a background save gives the caller its thread back after one copy."""
    deadline_seconds: float = 1800.0
    """The longest wait for another rank or for storage."""
    most_in_flight: int = 2
    """Background saves that may be under way; one more waits for the oldest."""
    on_failure: str = "raise"
    """What a background save that failed does to the next ``save`` or ``wait``: ``raise`` on all ranks, or ``warn`` in
    the log and go on."""
    retries: int = 0
    """How often a save that failed in storage is written again, from staged memory that is kept until then."""
    overlap_staging: bool = True
    """Copy what an optimizer owns while forward and backward run; its next ``step`` waits for the copy."""
    dedup_across_runs: bool = False
    """Deduplicate against every run of the store, through its index, and not only against this run's newest snapshot
    and the bases of the call. A process's first save reads one small object for each snapshot of the store."""
    check_replicas: bool = False
    """Compare all copies of replicated tensors to the last byte; else, of those of several tiles, one tile each."""
    codec: str = "raw"
    """``raw`` or ``zstd``."""
    pack_bytes: int = 64 << 20
    trace_folder: str | os.PathLike[str] | None = None
    """Where each rank writes when its phases began and ended, a file a save; see ``merge_traces``. None: nowhere."""

    def __post_init__(self) -> None:
        if self.host_budget_bytes is not None and self.host_budget_bytes < SMALLEST_BUDGET_BYTES:
            raise ConfigError(f"cannot save with host_budget_bytes={self.host_budget_bytes}: it must be 32 MiB or more")
        if self.host_budget_bytes is not None and self.retries:
            raise ConfigError(
                f"cannot save with retries={self.retries} within host_budget_bytes={self.host_budget_bytes}: to be "
                "written again, a save must stay in memory whole - give up one of the two"
            )
        if self.on_failure not in {"raise", "warn"}:
            raise ConfigError(f"cannot save with on_failure={self.on_failure!r}: 'raise' or 'warn'")
        if self.codec not in {"raw", "zstd"}:
            raise ConfigError(f"cannot save with codec={self.codec!r}: 'raw' or 'zstd'")
        if self.most_in_flight < 1 or self.retries < 0 or self.deadline_seconds <= 0 or self.pack_bytes < 1 << 20:
            raise ConfigError(f"cannot save with {self}: a bound is too small")
