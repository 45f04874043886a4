"""The ranks of one save or load, as the few collectives that they need; with a twin for one process.

Only bytes cross between ranks, never pickles. Collectives run on the thread that calls save or load, so that they keep
their order on all ranks; the background of a save meets the others through the store instead.
"""

from __future__ import annotations

import abc
import datetime as dt
import itertools
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from vescale_ckpt.errors import ConfigError, RankFailureError, StateError, VeScaleError
from vescale_ckpt.state.merge import format_ranks
from vescale_storage.digest import digest

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
            Exception: what ``do`` raised here; it may run the caller's own code, so this is any class.
            RankFailureError: it raised on other ranks only.
        """
        error: Exception | None = None
        result: T | None = None
        try:
            result = do()
        except Exception as problem:  # noqa: BLE001 -- raised again once the others know, who would wait for this rank
            error = problem
        self.agree(error, phase)
        return cast("T", result)

    def agree(self, error: Exception | None, phase: str) -> None:
        """Raise on every rank if any rank brings an error: its own where it has one, else one naming the others'.

        Costs one fixed-size collective where all is well.

        Raises:
            Exception: this rank's own error; one of ours has the other ranks' in its context.
            RankFailureError: other ranks failed, this one did not.
        """
        flags = self.all_gather_fixed(b"\1" if error else b"\0")
        if not any(flag[0] for flag in flags):
            return
        messages = self.all_gather((f"{type(error).__name__}: {error}" if error else "").encode())
        failures = {r: m.decode(errors="replace") for r, m in enumerate(messages) if flags[r][0]}
        if isinstance(error, VeScaleError):
            error.context["failures"] = failures
        if error is not None:
            raise error
        lines = "; ".join(f"rank {r}: {m}" for r, m in failures.items())
        raise RankFailureError(f"{phase} failed on other ranks - {lines}", failures=failures, phase=phase)

    def close(self) -> None:
        """Release connections; no collective may follow. A second call does nothing."""


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
    """Ranks of a torch process group, over gloo connections of their own with their own deadline.

    Making one is a collective over ``process_group`` and over nobody else.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, deadline_seconds: float) -> None:
        base = dist.group.WORLD if process_group is None else process_group
        self.rank = dist.get_rank(base)
        if self.rank < 0:
            raise ConfigError("this process is not one of the ranks of the process group that save or load together")
        self.world_size = dist.get_world_size(base)
        self._deadline_seconds = deadline_seconds
        self._gloo: dist.ProcessGroup | None = None
        self._store = PrefixStore(_next_name(dist.get_process_group_ranks(base)), _get_default_store())
        self._num_calls = 0
        self._guarded("connecting", self._connect)

    def all_gather_fixed(self, data: bytes) -> list[bytes]:
        """Return every rank's data, by rank."""
        mine = _tensor(data)
        out = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._guarded("all-gather", lambda: self._connected.allgather([out], [mine]).wait())
        return [_bytes(t) for t in out]

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming_bytes: Sequence[int]) -> list[torch.Tensor]:
        """Exchange tensors of bytes, all to all."""
        sizes_out = [t.numel() for t in outgoing]
        sizes_in = list(incoming_bytes)
        sent = torch.cat(list(outgoing)) if sum(sizes_out) else torch.empty(0, dtype=torch.uint8)
        received = torch.empty(sum(sizes_in), dtype=torch.uint8)
        self._guarded("exchange", lambda: self._connected.alltoall_base(received, sent, sizes_in, sizes_out).wait())
        starts = [0, *itertools.accumulate(sizes_in)]
        return [received[a : a + n] for a, n in zip(starts, sizes_in, strict=False)]

    def close(self) -> None:
        """Close the connections; no collective may follow."""
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            gloo.shutdown()

    def _broadcast(self, data: bytes, length: int, root: int) -> bytes:
        buffer = _tensor(data) if self.rank == root else torch.empty(length, dtype=torch.uint8)
        if length:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            self._guarded("broadcast", lambda: self._connected.broadcast([buffer], options).wait())
        return _bytes(buffer)

    def _connect(self) -> None:
        deadline = dt.timedelta(seconds=self._deadline_seconds)
        made: Any = dist.ProcessGroupGloo(self._store, self.rank, self.world_size, deadline)
        self._gloo = made  # has a group's collectives, though it is only a group's back end

    @property
    def _connected(self) -> dist.ProcessGroup:
        if self._gloo is None:
            raise StateError("these ranks have closed their connections: make a Checkpointer anew")
        return self._gloo

    def _guarded(self, what: str, call: Callable[[], object]) -> None:
        self._num_calls += 1
        try:
            self._store.set(f"at/{self.rank}", str(self._num_calls))
            call()
        except VeScaleError:
            raise
        except RuntimeError as error:
            late = self._late_ranks()
            who = f"{format_ranks(late)} did not come" if late else "a peer died in it"
            raise RankFailureError(
                f"{what} over {self.world_size} ranks failed on rank {self.rank} - {who} within "
                f"{self._deadline_seconds:g} s: killed, stuck, or not calling save and load as the others do - {error}",
                failures=dict.fromkeys(late, f"did not come to {what}"),
                phase=what,
                rank=self.rank,
            ) from error

    def _late_ranks(self) -> list[int]:
        """Return the ranks that have not begun the collective that failed, as far as the rendezvous store tells."""
        late = []
        for rank in range(self.world_size):
            try:
                key = f"at/{rank}"
                if not self._store.check([key]) or int(self._store.get(key)) < self._num_calls:
                    late.append(rank)
            except RuntimeError:  # the store lived in a process that is gone: nobody can tell any more
                return []
        return late


_num_made: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
"""Per rendezvous store: how many groups of the same ranks this process has made."""


def _next_name(ranks: Sequence[int]) -> str:
    """Return a name for the next group of these ranks, which all of them come to without asking one another.

    ``dist.new_group`` cannot give one: without all ranks of the default group it names a group by how many groups the
    process is in, and that differs between ranks, so that they wait for one another under different names.
    """
    members = digest(",".join(map(str, ranks)).encode()).hex()[:32]
    made = _num_made.setdefault(_get_default_store(), Counter())
    made[members] += 1
    return f"vescale-ckpt/{members}/{made[members]}"


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
