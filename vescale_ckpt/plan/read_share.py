"""The share of reading: of the stored chunks that all ranks need, which rank reads which, and in which rounds.

A chunk that several ranks need is read by one of them and handed to the others, so storage gives every byte once, as
long as that is not slower than reading it several times. Every rank makes the same division from the rows that all
ranks need, and keeps what concerns itself; thousands of ranks and millions of rows are sorted and not looped over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.plan.read_cost import ReadCost
from vescale_ckpt.plan.rows import water_levels
from vescale_ckpt.state.dtypes import item_bytes
from vescale_storage.codec import Codec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.records import Manifest

    Int64s = npt.NDArray[np.int64]

NOBODY = -1
_DEFAULT_COST = ReadCost()
RAW = int(Codec.RAW)
_MOST_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class ReadShare:
    """What one rank reads, and what it exchanges with the others."""

    own: Int64s
    """Rows that this rank reads for itself: nobody else needs them, or whoever does reads them too."""
    rounds: tuple[SharedRound, ...]
    """What of the rows that several ranks need concerns this one; as many rounds on every rank, some of them empty."""
    reader: npt.NDArray[np.int32]  # [num_chunks]
    """The rank that reads each row, the lowest where several do, ``NOBODY`` where nobody needs it; the same on all
    ranks."""


@dataclass(frozen=True, slots=True)
class SharedRound:
    """Rows that are read once and exchanged, as far as one rank reads or wants them; ascending."""

    rows: Int64s  # [num_rows]
    raw_bytes: Int64s  # [num_rows] decoded
    reader: Int64s  # [num_rows] the rank that reads it, and needs it itself
    to_place: Int64s  # [num_sends] index in ``rows`` of what this rank sends; by rank, then by place
    to_rank: Int64s  # [num_sends] to whom


@dataclass(frozen=True, slots=True)
class _Shared:
    """The rows that several ranks need, with the ranks that need them."""

    rows: Int64s  # [n] ascending
    rank: Int64s  # [m] row after row, ascending within a row
    start: Int64s  # [n + 1] where in ``rank`` those of a row begin
    stored_bytes: Int64s  # [n]
    raw_bytes: Int64s  # [n]

    @property
    def counts(self) -> Int64s:
        """How many ranks need each row."""
        return np.diff(self.start)

    def take(self, keep: npt.NDArray[np.bool_]) -> _Shared:
        """Return some of the rows."""
        counts = self.counts
        rank = self.rank[np.repeat(keep, counts)]
        start = np.concatenate([[0], np.cumsum(counts[keep])])
        return _Shared(self.rows[keep], rank, start, self.stored_bytes[keep], self.raw_bytes[keep])


def share_reads(
    manifest: Manifest, needed: Sequence[Int64s], *, rank: int, round_bytes: int, cost: ReadCost = _DEFAULT_COST
) -> ReadShare:
    """Divide the rows that all ranks need into those to read by whoever needs them and those to read once and exchange.

    Args:
        manifest: what is loaded.
        needed: per rank, the ascending rows that it needs.
        rank: whose share to return.
        round_bytes: how many bytes of chunks any one rank holds, sends and receives in a round, unless a single chunk
            is more.
        cost: whether to share what several ranks need; must be the same on all ranks.
    """
    lengths = np.array([len(rows) for rows in needed], dtype=np.int64)
    every = np.concatenate(needed) if needed else np.empty(0, dtype=np.int64)
    by = np.repeat(np.arange(len(needed)), lengths)
    count = np.bincount(every, minlength=len(manifest.chunks))
    reader = np.full(len(manifest.chunks), NOBODY, dtype=np.int32)
    alone = count[every] == 1
    reader[every[alone]] = by[alone]
    shared = _gather(manifest, every[~alone], by[~alone])
    loads = np.bincount(by[alone], weights=manifest.chunks.length[every[alone]], minlength=len(needed)).astype(np.int64)
    is_own = count == 1
    if shared.rows.size:
        direct = _read_by_all(shared, cost)
        many = shared.take(direct)
        is_own[many.rows] = True
        reader[many.rows] = many.rank[many.start[:-1]]
        np.add.at(loads, many.rank, np.repeat(many.stored_bytes, many.counts))
        shared = shared.take(~direct)
    own = needed[rank][is_own[needed[rank]]]
    if not shared.rows.size:
        return ReadShare(own, (), reader)
    readers = _choose_readers(shared, loads)
    reader[shared.rows] = readers
    rounds = [
        _of_rank(shared, readers, members, rank) for members in _rounds(shared, readers, len(needed), round_bytes)
    ]
    return ReadShare(own, tuple(rounds), reader)


def raw_bytes_of(manifest: Manifest, rows: Int64s) -> Int64s:
    """Return how many bytes each chunk has once decoded, for ascending rows of the chunk table."""
    chunks = manifest.chunks
    out: Int64s = chunks.length[rows].astype(np.int64)
    encoded = np.flatnonzero(chunks.codec[rows] != RAW)
    tensors = np.searchsorted(chunks.first, rows[encoded], side="right") - 1
    cuts = np.flatnonzero(np.diff(tensors)) + 1
    for places in np.split(encoded, cuts) if encoded.size else ():
        low, high = int(rows[places[0]]), int(rows[places[-1]]) + 1
        record = manifest.tensors[int(np.searchsorted(chunks.first, low, side="right")) - 1]
        out[places] = chunks.raw_bytes(record, range(low, high), item_bytes(record.dtype))[rows[places] - low]
    return out


def _gather(manifest: Manifest, every: Int64s, by: Int64s) -> _Shared:
    """Return the rows with the ranks that need them, from (row, rank) pairs by rank."""
    order = np.argsort(every, kind="stable")
    every = every[order]
    first = np.flatnonzero(np.diff(every, prepend=-1))
    rows = every[first]
    stored = manifest.chunks.length[rows].astype(np.int64)
    return _Shared(rows, by[order], np.append(first, every.size), stored, raw_bytes_of(manifest, rows))


def _read_by_all(shared: _Shared, cost: ReadCost) -> npt.NDArray[np.bool_]:
    """Return which rows are not worth an exchange: whoever needs them reads them."""
    direct = np.zeros(len(shared.rows), dtype=np.bool_)
    for members, places in _sets(shared):
        direct[places] = not cost.shares(len(members), int(shared.stored_bytes[places].sum()))
    return direct


def _choose_readers(shared: _Shared, loads: Int64s) -> Int64s:
    """Return the reader of each row, one of those that need it, so that all read about the same; raises ``loads``."""
    readers = np.empty(len(shared.rows), dtype=np.int64)
    for members, places in _sets(shared):
        sizes = shared.stored_bytes[places]
        ends = np.cumsum(sizes)
        quota = np.cumsum(water_levels(loads[members], int(ends[-1])))
        at = np.minimum(np.searchsorted(quota, ends - sizes + sizes // 2, side="right"), len(members) - 1)
        readers[places] = members[at]
        np.add.at(loads, members[at], sizes)
    return readers


def _sets(shared: _Shared) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield (ranks, places of the rows that exactly these need); sets of few ranks first, with the least choice."""
    # A set of ranks is known by the sum of one fixed 64-bit word per rank (Zobrist hashing).
    words = np.random.default_rng(20260101).integers(0, 2**63, size=int(shared.rank.max()) + 1, dtype=np.uint64)
    sums = np.add.reduceat(words[shared.rank], shared.start[:-1])
    by_set = np.lexsort([sums, shared.counts])
    cuts = np.flatnonzero(np.diff(sums[by_set])) + 1
    sets = np.split(by_set, cuts)
    counts = shared.counts
    for places in sorted(sets, key=lambda places: (int(counts[places[0]]), int(places.min()))):
        low = int(shared.start[places[0]])
        yield shared.rank[low : low + int(counts[places[0]])], np.sort(places)


def _rounds(shared: _Shared, readers: Int64s, num_ranks: int, round_bytes: int) -> Iterator[Int64s]:
    """Yield the places of each round's rows: as many as fit on every rank, all ranks getting on at one pace."""
    held = shared.raw_bytes * shared.counts  # at the reader: the row, and a copy for each other rank
    by_reader = np.argsort(readers, kind="stable")
    pace = np.cumsum(held[by_reader])
    starts = np.flatnonzero(np.diff(readers[by_reader], prepend=-1))
    pace -= np.repeat(pace[starts] - held[by_reader][starts], np.diff(np.append(starts, len(pace))))
    order = by_reader[np.argsort(pace, kind="stable")]
    begin, step = 0, _MOST_ROWS_AT_ONCE
    usage, taken = np.zeros(num_ranks, dtype=np.int64), 0
    while begin + taken < len(order):
        more = order[begin + taken : begin + taken + step]
        after = usage + _usage(shared, readers, held, more, num_ranks)
        if after.max() <= round_bytes or (taken == 0 and len(more) == 1):
            usage, taken = after, taken + len(more)
            step = min(2 * step, _MOST_ROWS_AT_ONCE)
        elif len(more) > 1:
            step = len(more) // 2
        else:
            yield order[begin : begin + taken]
            begin, taken, usage = begin + taken, 0, np.zeros(num_ranks, dtype=np.int64)
    yield order[begin:]


def _usage(shared: _Shared, readers: Int64s, held: Int64s, places: Int64s, num_ranks: int) -> Int64s:
    """Return the bytes that rows take on each rank: what it reads and sends, and what it receives."""
    entries, which = _entries(shared, places)
    ranks, sizes = shared.rank[entries], shared.raw_bytes[places][which]
    usage: Int64s = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(usage, readers[places], held[places])
    np.add.at(usage, ranks, np.where(ranks == readers[places][which], 0, sizes))
    return usage


def _entries(shared: _Shared, places: Int64s) -> tuple[Int64s, Int64s]:
    """Return (indexes in ``shared.rank``, index in ``places``) of all ranks that need some rows."""
    counts = shared.counts[places]
    which = np.repeat(np.arange(len(places)), counts)
    ends = np.cumsum(counts)
    entries = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return entries + np.repeat(shared.start[places], counts), which


def _of_rank(shared: _Shared, readers: Int64s, places: Int64s, rank: int) -> SharedRound:
    """Return what of a round concerns a rank."""
    places = np.sort(places)
    entries, which = _entries(shared, places)
    wanted = np.zeros(len(places), dtype=bool)
    wanted[which[shared.rank[entries] == rank]] = True  # a reader is among those that want it
    mine = places[wanted]
    entries, which = _entries(shared, mine)
    ranks = shared.rank[entries]
    sends = np.flatnonzero((readers[mine][which] == rank) & (ranks != rank))
    order = sends[np.argsort(ranks[sends], kind="stable")]
    return SharedRound(shared.rows[mine], shared.raw_bytes[mine], readers[mine], which[order], ranks[order])
