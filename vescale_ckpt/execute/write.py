"""Write: staged parts become chunks, digests and packs in storage, as one pipeline of bounded memory.

Chunks are gathered into blocks of reused memory and hashed by worker threads; one thread takes the blocks in order,
drops what dedup finds, lays the rest out in packs and puts them while later blocks are gathered. The order is that of
the plan, so a retry of the same save makes the same packs under the same names.
"""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from vescale_ckpt.errors import InternalError, ObjectNotFoundError
from vescale_ckpt.execute.relaid import Relaid
from vescale_ckpt.format.records import PackRecord
from vescale_ckpt.plan.parts import ChunkPlan, chunks_of, sample_tile
from vescale_ckpt.stage.raw import aligned, memory_of, shaped
from vescale_storage import loop
from vescale_storage.digest import digest, digest_parts
from vescale_storage.keys import pack_key
from vescale_storage.pack import Codec, PackBuilder, encode_chunk, put_pack

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from vescale_ckpt.execute.dedup import DedupIndex, Location
    from vescale_ckpt.execute.relaid import Claim
    from vescale_ckpt.format.records import TensorRecord
    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.stage.memory import BufferPool
    from vescale_ckpt.stage.stager import StagedPart
    from vescale_storage.backend import Backend, Buffer
    from vescale_storage.pack import Pack

_UNIQUE_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How a save writes."""

    pack_bytes: int = 64 << 20
    """A pack is closed when it holds this many bytes."""
    codec: int = Codec.RAW
    """A ``Codec``; a chunk that does not shrink is stored raw all the same."""
    compare_whole: bool = True
    """Copies of a tensor are compared by all tiles; else by its ``sample_tile``."""
    num_workers: int = 2
    """Threads that gather and hash."""
    num_puts: int = 4
    """Packs in flight."""


@dataclass(slots=True)
class Written:
    """What one rank wrote or found in storage already: columns of its chunks, in the plan's order."""

    tensor: list[int] = field(default_factory=list)
    tile: list[int] = field(default_factory=list)
    partial: list[tuple[int, Box]] = field(default_factory=list)
    """(place in the columns, box) of each chunk that is only a part of its tile, and of each that is shared."""
    shares: list[tuple[int, Box]] = field(default_factory=list)
    """(place in the columns, what this rank holds of it) of each stored chunk that other ranks hold the rest of."""
    digest: list[bytes] = field(default_factory=list)
    pack: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    codec: list[int] = field(default_factory=list)
    packs: list[PackRecord] = field(default_factory=list)
    new_packs: set[str] = field(default_factory=set)
    """Names of the packs that this save made."""
    compared: dict[int, bytes] = field(default_factory=dict)
    """Tensor -> digest of the digests of its tiles that are compared, for tensors of which other ranks hold a copy."""
    bytes_total: int = 0
    """Of all chunks, before dedup and codec."""
    bytes_deduplicated: int = 0
    bytes_stored: int = 0
    """Of new chunks, as stored."""
    bytes_put: int = 0
    """Of new packs, footers included."""
    seconds_put: float = 0.0
    """Summed over puts, which overlap."""

    def count_packs(self, packs: Sequence[PackRecord]) -> None:
        """Count packs that this rank put besides its own chunks."""
        self.new_packs.update(pack.name for pack in packs)
        self.bytes_put += sum(pack.size_bytes for pack in packs)


@dataclass(frozen=True, slots=True)
class _Item:
    """A chunk in a block."""

    chunk: ChunkPlan
    start: int
    num_bytes: int
    source: StagedPart


@dataclass(slots=True)
class _Block:
    """Chunks that are gathered into one buffer by one worker."""

    items: list[_Item]
    buffer: torch.Tensor
    pooled: bool
    users: int = 0
    """Chunks whose bytes a pack in flight still refers to."""


@dataclass(slots=True)
class _OpenPack:
    builder: PackBuilder
    number: int
    """Index in ``Written.packs``."""
    blocks: list[_Block] = field(default_factory=list)


class Writer:
    """One rank's writing of one save. Call ``write`` once, from one thread.

    Args:
        backend: where to.
        records: the plan's tensors.
        index: what is stored already.
        blocks: memory to gather in.
        options: how.
        marked: names that a new pack must not have, because a collection may be about to delete what has them.
    """

    def __init__(
        self,
        backend: Backend,
        records: Sequence[TensorRecord],
        index: DedupIndex,
        blocks: BufferPool,
        options: WriteOptions,
        *,
        marked: Container[str] = (),
    ) -> None:
        self._backend = backend
        self._records = records
        self._index = index
        self._marked = marked
        self._pool = blocks
        self._options = options
        self._written = Written()
        self._relaid = Relaid(backend, records, index.manifests, self._may_refer)
        self._seen: dict[bytes, tuple[int, int, int, int]] = {}
        self._known_packs: dict[str, int] = {}
        self._there: dict[str, bool] = {}
        self._pack: _OpenPack | None = None
        self._gathering: deque[tuple[_Block, Future[list[tuple[bytes, int, Buffer]]]]] = deque()
        self._puts: deque[tuple[_OpenPack, Future[bool], float]] = deque()
        self._tile_digests: dict[int, dict[int, bytes]] = {}

    def write(self, parts: Iterable[StagedPart], compared: frozenset[int] = frozenset()) -> Written:
        """Write all parts and return what became of them, after everything is durable.

        Args:
            parts: staged parts, in the plan's order; released as their bytes are gathered.
            compared: tensors whose digest over the tiles compared to return in ``Written.compared``.

        Raises:
            VeScaleError: of the back end; nothing is committed, packs already put stay for a retry or for gc.
        """
        self._tile_digests = {tensor: {} for tensor in compared}
        with ThreadPoolExecutor(self._options.num_workers, thread_name_prefix="vescale-gather") as workers:
            try:
                for items in self._blocks(parts):
                    block = self._obtain(items)
                    self._gathering.append((block, workers.submit(self._gather, block)))
                    while self._gathering and self._gathering[0][1].done():
                        self._absorb()
                while self._gathering:
                    self._absorb()
                self._close_pack()
                while self._puts:
                    self._settle()
            finally:
                self._abandon()
        self._written.compared = {
            tensor: digest_parts([tiles[t] for t in sorted(tiles)]) for tensor, tiles in self._tile_digests.items()
        }
        return self._written

    def _blocks(self, parts: Iterable[StagedPart]) -> Iterable[list[_Item]]:
        """Yield the chunks of all parts, grouped to fill a block each."""
        items: list[_Item] = []
        start = 0
        for staged in parts:
            record = self._records[staged.part.tensor]
            item_bytes = staged.source.element_size()
            for chunk in chunks_of(staged.part, record):
                num_bytes = chunk.box.volume * item_bytes
                if items and start + num_bytes > self._pool.buffer_bytes:
                    yield items
                    items, start = [], 0
                staged.hold()
                items.append(_Item(chunk, start, num_bytes, staged))
                start = aligned(start + num_bytes)
            staged.release()
        if items:
            yield items

    def _obtain(self, items: list[_Item]) -> _Block:
        """Return a block for these items, making room by finishing earlier work where all buffers are in use.

        The open pack is closed last, when it holds every buffer: so where packs end depends on the chunks alone and not
        on how fast storage is, and a retry makes the same packs.
        """
        needed = items[-1].start + items[-1].num_bytes
        if needed > self._pool.buffer_bytes:
            return _Block(items, torch.empty(needed, dtype=torch.uint8), pooled=False)
        while (buffer := self._pool.try_take()) is None:
            if self._gathering:
                self._absorb()
            elif self._puts:
                self._settle()
            elif self._pack is not None:
                self._close_pack()
            else:
                raise InternalError("all buffers to write from are in use, and not by this save")
        return _Block(items, buffer, pooled=True)

    def _gather(self, block: _Block) -> list[tuple[bytes, int, Buffer]]:
        """Copy and hash the chunks of a block; return (digest, codec, stored bytes) of each. Runs on a worker."""
        memory = memory_of(block.buffer)
        out: list[tuple[bytes, int, Buffer]] = []
        for item in block.items:
            source = item.source.source
            box, part = item.chunk.box, item.source.part.box
            view = source if box == part else source[box.relative_to(part).slices]
            shaped(block.buffer, item.start, source.dtype, box.shape).copy_(view)
            item.source.release()
            raw = memory[item.start : item.start + item.num_bytes]
            codec, stored = Codec.RAW, cast("Buffer", raw)
            if self._options.codec != Codec.RAW and item.chunk.stored:
                codec, stored = encode_chunk(raw, Codec(self._options.codec), source.element_size())
            out.append((digest(raw), codec, stored))
        return out

    def _absorb(self) -> None:
        """Take the oldest gathered block: drop what is known, add the rest to the open pack."""
        block, future = self._gathering.popleft()
        results = future.result()
        block.users = 1
        for item, (name, codec, stored) in zip(block.items, results, strict=True):
            chunk = item.chunk
            if chunk.tensor in self._tile_digests and self._is_compared(chunk):
                self._tile_digests[chunk.tensor][chunk.tile] = name
            if not chunk.stored:
                continue
            self._written.bytes_total += item.num_bytes
            place = self._known(name)
            if place is not None:
                self._written.bytes_deduplicated += item.num_bytes
            elif claims := self._relaid.find(chunk, block.buffer[item.start : item.start + item.num_bytes]):
                self._written.bytes_deduplicated += item.num_bytes
                self._claim(chunk, claims)
                continue
            else:
                place = self._add(block, name, codec, stored)
            self._record(chunk.tensor, chunk.tile, name, place, None if chunk.whole_tile else chunk.box)
        self._drop(block)
        if self._pack is not None and self._pack.builder.size_bytes >= self._options.pack_bytes:
            self._close_pack()
        while self._puts and (self._puts[0][1].done() or len(self._puts) > self._options.num_puts):
            self._settle()

    def _is_compared(self, chunk: ChunkPlan) -> bool:
        return self._options.compare_whole or chunk.tile == sample_tile(self._records[chunk.tensor])

    def _known(self, name: bytes) -> tuple[int, int, int, int] | None:
        """Return (pack, offset, length, codec) of a chunk that is stored already."""
        place = self._seen.get(name)
        if place is None:
            found = self._index.find(name)
            if found is None or not self._is_there(found.pack):
                return None
            place = self._seen[name] = self._refer(found)
        return place

    def _may_refer(self, pack: PackRecord) -> bool:
        return self._index.may_refer(pack) and self._is_there(pack)

    def _is_there(self, pack: PackRecord) -> bool:
        """Return whether storage has a pack that a base refers to; a chunk of one that was lost is written anew."""
        there = self._there.get(pack.name)
        if there is None:
            try:
                there = loop.run(self._backend.head(pack_key(pack.name))).size_bytes == pack.size_bytes
            except ObjectNotFoundError:
                there = False
            self._there[pack.name] = there
        return there

    def _refer(self, found: Location) -> tuple[int, int, int, int]:
        number = self._known_packs.setdefault(found.pack.name, len(self._written.packs))
        if number == len(self._written.packs):
            self._written.packs.append(found.pack)
        return number, found.offset, found.length, found.codec

    def _add(self, block: _Block, name: bytes, codec: int, stored: Buffer) -> tuple[int, int, int, int]:
        if self._pack is None:
            self._pack = _OpenPack(PackBuilder(), len(self._written.packs))
            self._written.packs.append(PackRecord("", 0))  # named when it is closed
        entry = self._pack.builder.add(name, [stored], Codec(codec))
        block.users += 1
        self._pack.blocks.append(block)
        self._written.bytes_stored += entry.length
        place = self._seen[name] = (self._pack.number, entry.offset, entry.length, int(entry.codec))
        return place

    def _claim(self, chunk: ChunkPlan, claims: Sequence[Claim]) -> None:
        """Record the stored chunks that hold a chunk's elements in its place."""
        for claim in claims:
            if claim.share != claim.box:
                self._written.shares.append((len(self._written.tensor), claim.share))
            self._record(chunk.tensor, chunk.tile, claim.digest, self._refer(claim.location), claim.box)

    def _record(self, tensor: int, tile: int, name: bytes, place: tuple[int, int, int, int], box: Box | None) -> None:
        written = self._written
        if box is not None:
            written.partial.append((len(written.tensor), box))
        written.tensor.append(tensor)
        written.tile.append(tile)
        written.digest.append(name)
        written.pack.append(place[0])
        written.offset.append(place[1])
        written.length.append(place[2])
        written.codec.append(place[3])

    def _close_pack(self) -> None:
        """Finish the open pack and start to put it."""
        if self._pack is None:
            return
        pack, opened = self._pack.builder.finish(), self._pack
        self._pack = None
        if pack.name_hex in self._marked:
            pack = renamed(opened.builder)
        self._written.packs[opened.number] = PackRecord(pack.name_hex, pack.size_bytes)
        self._written.new_packs.add(pack.name_hex)
        self._written.bytes_put += pack.size_bytes
        self._puts.append((opened, loop.submit(put_pack(self._backend, pack)), time.monotonic()))

    def _settle(self) -> None:
        """Wait for the oldest put and free its blocks."""
        opened, future, began = self._puts.popleft()
        future.result()
        self._written.seconds_put += time.monotonic() - began
        for block in opened.blocks:
            self._drop(block)

    def _drop(self, block: _Block) -> None:
        block.users -= 1
        if block.users == 0 and block.pooled:
            self._pool.give_back(block.buffer)

    def _abandon(self) -> None:
        """Wait until nothing in flight touches the buffers; after a failure the caller throws its pools away."""
        wait_for([future for _, future in self._gathering])
        for _, put, _ in self._puts:
            put.cancel()
        wait_for([put for _, put, _ in self._puts])


def renamed(builder: PackBuilder) -> Pack:
    """Return the pack under a name that it never had, by a chunk of random bytes that nothing refers to.

    To put it again under its own name would not be enough: a deletion may be on its way that began before.
    """
    unique = os.urandom(_UNIQUE_BYTES)
    builder.add(digest(unique), [unique], Codec.RAW)
    return builder.finish()
