"""The ranks of one save or load, as the few collectives that they need; with a twin for one process.

Only bytes cross between ranks, never pickles. Collectives run on the thread that calls save or load, so that they keep
their order on all ranks; the background of a save meets the others through the store instead.
"""

from __future__ import annotations

import abc
import datetime as dt
import itertools
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

from vescale_ckpt.errors import ConfigError, RankFailureError, VeScaleError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class Group(abc.ABC):
    """Ranks that save or load together."""

    rank: int
    world_size: int

    @abc.abstractmethod
    def all_gather_fixed(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank; all must be of the same length (one collective)."""

    @abc.abstractmethod
    def exchange(self, outgoing: Sequence[torch.Tensor], incoming_bytes: Sequence[int]) -> list[torch.Tensor]:
        """Send ``outgoing[r]`` (uint8, 1-D) to every rank r; return what each rank sent here, by rank.

        ``incoming_bytes[r]`` must be what rank r sends here: all ranks know all sizes from their common plan.
        """

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank; lengths may differ (two collectives)."""
        lengths = [int.from_bytes(b, "little") for b in self.all_gather_fixed(len(data).to_bytes(8, "little"))]
        widest = max(lengths)
        if widest == 0:
            return [b""] * self.world_size
        padded = self.all_gather_fixed(data.ljust(widest, b"\0"))
        return [b[:n] for b, n in zip(padded, lengths, strict=True)]

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """Return the root's ``data`` on every rank; the others pass None."""
        mine = (data or b"") if self.rank == root else b""
        length = int.from_bytes(self.all_gather_fixed(len(mine).to_bytes(8, "little"))[root], "little")
        return self._broadcast(mine, length, root)

    @abc.abstractmethod
    def _broadcast(self, data: bytes, length: int, root: int) -> bytes:
        """Return the root's ``data``, whose length all ranks know."""

    def attempt(self, phase: str, do: Callable[[], T]) -> T:
        """Return what ``do`` returns here, after it went well on every rank; raise on all ranks where it did not.

        Raises:
            VeScaleError: what ``do`` raised here.
            RankFailureError: it raised on other ranks only.
        """
        error: VeScaleError | None = None
        result: T | None = None
        try:
            result = do()
        except VeScaleError as problem:
            error = problem
        self.agree(error, phase)
        return cast("T", result)

    def agree(self, error: VeScaleError | None, phase: str) -> None:
        """Raise on every rank if any rank brings an error: its own where it has one, else one naming the others'.

        Costs one fixed-size collective where all is well.

        Raises:
            VeScaleError: this rank's own error, with the other ranks' added to its context.
            RankFailureError: other ranks failed, this one did not.
        """
        flags = self.all_gather_fixed(b"\1" if error else b"\0")
        if not any(flag[0] for flag in flags):
            return
        messages = self.all_gather((f"{type(error).__name__}: {error}" if error else "").encode())
        failures = {r: m.decode(errors="replace") for r, m in enumerate(messages) if flags[r][0]}
        if error is not None:
            error.context["failures"] = failures
            raise error
        lines = "; ".join(f"rank {r}: {m}" for r, m in failures.items())
        raise RankFailureError(f"{phase} failed on other ranks - {lines}", failures=failures, phase=phase)


class SoloGroup(Group):
    """One process alone."""

    rank = 0
    world_size = 1

    def all_gather_fixed(self, data: bytes) -> list[bytes]:
        """Return the only rank's data."""
        return [data]

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming_bytes: Sequence[int]) -> list[torch.Tensor]:  # noqa: ARG002 -- the interface's
        """Return what this rank sent to itself."""
        return [outgoing[0]]

    def _broadcast(self, data: bytes, length: int, root: int) -> bytes:  # noqa: ARG002 -- the interface's
        return data


class TorchGroup(Group):
    """Ranks of a torch process group, over a gloo group of their own with its own deadline.

    Making one is a collective over ``process_group``.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, deadline_seconds: float) -> None:
        ranks = dist.get_process_group_ranks(process_group if process_group is not None else dist.group.WORLD)
        made = dist.new_group(
            ranks,
            backend="gloo",
            timeout=dt.timedelta(seconds=deadline_seconds),
            use_local_synchronization=process_group is not None,
        )
        if made is None or made == dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError(f"this process is not one of the ranks {ranks} that save or load together")
        self._group = made
        self._deadline_seconds = deadline_seconds
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self._global_ranks = ranks

    def all_gather_fixed(self, data: bytes) -> list[bytes]:
        """Return every rank's data, by rank."""
        mine = _tensor(data)
        out = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._guarded("all-gather", lambda: dist.all_gather(out, mine, group=self._group))
        return [_bytes(t) for t in out]

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming_bytes: Sequence[int]) -> list[torch.Tensor]:
        """Exchange tensors of bytes, all to all."""
        sizes_out = [t.numel() for t in outgoing]
        sizes_in = list(incoming_bytes)
        sent = torch.cat(list(outgoing)) if sum(sizes_out) else torch.empty(0, dtype=torch.uint8)
        received = torch.empty(sum(sizes_in), dtype=torch.uint8)
        self._guarded(
            "exchange", lambda: dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=self._group)
        )
        starts = [0, *itertools.accumulate(sizes_in)]
        return [received[a : a + n] for a, n in zip(starts, sizes_in, strict=False)]

    def _broadcast(self, data: bytes, length: int, root: int) -> bytes:
        buffer = _tensor(data) if self.rank == root else torch.empty(length, dtype=torch.uint8)
        if length:
            source = self._global_ranks[root]
            self._guarded("broadcast", lambda: dist.broadcast(buffer, src=source, group=self._group))
        return _bytes(buffer)

    def _guarded(self, what: str, call: object) -> None:
        try:
            call()  # type: ignore[operator]
        except RuntimeError as error:
            raise RankFailureError(
                f"{what} over {self.world_size} ranks failed on rank {self.rank} - {error} - a peer died, or did not "
                f"call save or load within {self._deadline_seconds:g} s",
                phase=what,
                rank=self.rank,
            ) from error


def default_group(process_group: dist.ProcessGroup | None, deadline_seconds: float) -> Group:
    """Return the group of ``process_group``; a SoloGroup where torch.distributed is not initialised."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return SoloGroup()
    return TorchGroup(process_group, deadline_seconds)


def _tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
