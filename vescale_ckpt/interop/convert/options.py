"""What a conversion is asked to do, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from vescale_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vescale_ckpt.interop.foreign.snapshot import ForeignTensor

DEFAULT_BUDGET_BYTES: Final = 512 << 20
MIN_BUDGET_BYTES: Final = 32 << 20
_DEFAULT_SHARD_BYTES: Final = 5 * 10**9
_MAX_PART_BYTES: Final = 64 << 20
_SHARES: Final = 5
"""A part is held as it is read, as it is gathered, as it is cast and as it is written; and the interpreter's own."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """How to lay out a target."""

    file_name: str = ""
    """Where the target is one file: its name."""
    max_shard_bytes: int | None = None
    """A file's tensors are at most this large together; None: as the source has it, or the default."""
    part_bytes: int = _MAX_PART_BYTES
    """What is read, cast and written at once."""

    @property
    def default_shard_bytes(self) -> int:
        """Where neither the caller nor the source says."""
        return _DEFAULT_SHARD_BYTES


def part_bytes_of(budget_bytes: int, workers: int) -> int:
    """Return how large a part may be for some workers to stay within a budget together.

    Raises:
        ConfigError: the budget is too small, or there are no workers.
    """
    if workers < 1:
        raise ConfigError(f"cannot convert with workers={workers}: at least 1 is needed")
    if budget_bytes < MIN_BUDGET_BYTES * workers:
        raise ConfigError(
            f"cannot convert with budget_bytes={budget_bytes}: each of {workers} workers needs {MIN_BUDGET_BYTES}"
        )
    return min(_MAX_PART_BYTES, budget_bytes // workers // _SHARES)


def cut_shards(tensors: Iterable[ForeignTensor], max_bytes: int) -> list[list[ForeignTensor]]:
    """Return the tensors in files, in their order; a file takes tensors until the next would be too much.

    Raises:
        ConfigError: ``max_bytes`` is not positive.
    """
    if max_bytes < 1:
        raise ConfigError(f"cannot convert with max_shard_bytes={max_bytes}: it must be positive")
    shards: list[list[ForeignTensor]] = []
    filled = 0
    for tensor in tensors:
        if not shards or (filled and filled + tensor.num_bytes > max_bytes):
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


@dataclass(slots=True)
class ConvertReport:
    """What a conversion did, in this process and its workers."""

    source: str
    target: str
    source_format: str
    target_format: str
    num_tensors: int
    num_bytes: int
    """Of all files written."""
    files: tuple[str, ...]
    carried: tuple[str, ...]
    """Small files that came along."""
    left_out: tuple[tuple[str, str], ...]
    """(name, why) of what the target's format cannot hold."""
    notes: tuple[str, ...] = ()
    overflowed: dict[str, int] = field(default_factory=dict)
    """Cast tensors -> how many of their finite values became infinite."""
    bytes_resumed: int = 0
    """Of the files, found whole from an interrupted conversion."""
    peak_rss_bytes: int = 0
    """Largest resident size of this process or of a worker, whichever is larger, the interpreter and torch included."""
    seconds: float = 0.0
