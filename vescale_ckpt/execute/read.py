"""Read: chunks come from storage in coalesced ranges, are verified and handed on, by a few threads of bounded memory.

Nothing is handed on before its digest is known to be right. A chunk that does not match is read once more, alone, past
every cache, and then from the mirror if the store has one; if it still differs, that is an error which names tensor,
box, pack and offset.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from vescale_ckpt.errors import CorruptionError, ObjectNotFoundError, StorageError, VeScaleError
from vescale_ckpt.plan.read_cost import ReadCost
from vescale_ckpt.stage.raw import memory_of
from vescale_ckpt.stage.threads import settle_torch
from vescale_ckpt.state.dtypes import item_bytes
from vescale_ckpt.state.tree import fqn
from vescale_storage import loop
from vescale_storage.digest import digest
from vescale_storage.keys import pack_key
from vescale_storage.pack import Codec, check_tail, decode_chunk, footer_bytes, read_footer
from vescale_storage.ranges import coalesce

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from vescale_ckpt.format.records import Manifest, PackRecord
    from vescale_ckpt.plan.load_plan import ChunkNeed
    from vescale_storage.backend import Backend, Buffer

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LONGEST_TAIL_BYTES = 64 << 10
"""What is read beyond the last chunk of ours for a pack's footer, as long as that is not known to be longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How a load reads."""

    span_bytes: int = 16 << 20
    """Ranges are coalesced up to this; a larger chunk is read alone."""
    gap_bytes: int = 0
    """Bytes between two ranges that are read along rather than asked for apart."""
    num_workers: int = 4
    """Threads that read, verify and copy; each holds one span."""
    cost: ReadCost = field(default_factory=ReadCost)
    """Whether ranks that need the same bytes share the reading; rank 0's counts for all."""
    trace_folder: str | os.PathLike[str] | None = None
    """Where each rank writes when its phases began and ended, a file a load; see ``merge_traces``. None: nowhere."""


@dataclass(slots=True)
class ReadCounters:
    """What reading cost this rank."""

    bytes_read: int = 0
    """Stored bytes of chunks, and of gaps read along."""
    bytes_footers: int = 0
    """Footers of packs, read to prove that the packs are whole."""
    requests: int = 0
    chunks: int = 0
    reread: int = 0
    """Chunks and footers read a second time because their digest did not match."""
    healed: int = 0
    """Those of them that only the mirror has sound."""
    seconds_storage: float = 0.0
    """Summed over threads."""


@dataclass(frozen=True, slots=True)
class _Span:
    pack: int
    start: int
    length: int
    needs: tuple[ChunkNeed, ...]
    tail_bytes: int
    """How many of the last bytes are the pack's tail: its footer, after chunks that this snapshot does not know."""


class Reader:
    """Reads chunks of one snapshot."""

    def __init__(self, backend: Backend, manifest: Manifest, options: ReadOptions) -> None:
        self._backend = backend
        self._manifest = manifest
        self._options = options
        self._local = threading.local()
        self._lock = threading.Lock()
        self.counters = ReadCounters()

    def read(
        self,
        needs: Sequence[ChunkNeed],
        deliver: Callable[[ChunkNeed, torch.Tensor], None],
        whole_packs: Sequence[int] = (),
    ) -> None:
        """Read chunks and hand each, verified, to ``deliver(need, raw)``.

        Args:
            needs: what to read, by row.
            deliver: called on reading threads; ``raw`` is uint8, 1-D, aligned for the tensor's items, and valid only
                during the call.
            whole_packs: packs (indexes) of which this rank proves that they are neither cut nor changed at their end.

        Raises:
            CorruptionError: stored bytes are damaged.
            ObjectNotFoundError: a pack is gone.
            StorageError: the environment failed.
        """
        spans = self._spans(needs, set(whole_packs))
        if not spans:
            return
        settle_torch()
        with ThreadPoolExecutor(
            min(self._options.num_workers, len(spans)), thread_name_prefix="vescale-read"
        ) as workers:
            futures = [workers.submit(self._read_span, span, deliver) for span in spans]
            done, waiting = wait_for(futures, return_when=FIRST_EXCEPTION)
            for future in waiting:
                future.cancel()
        for future in [*done, *waiting]:
            if not future.cancelled():
                future.result()

    def _spans(self, needs: Sequence[ChunkNeed], whole_packs: set[int]) -> list[_Span]:
        """Return the ranges to read, by pack and offset."""
        chunks = self._manifest.chunks
        by_pack: dict[int, list[ChunkNeed]] = {pack: [] for pack in whole_packs}
        for need in needs:
            by_pack.setdefault(int(chunks.pack[need.row]), []).append(need)
        spans: list[_Span] = []
        for pack, members in sorted(by_pack.items()):
            members.sort(key=lambda need: int(chunks.offset[need.row]))
            ranges = [(int(chunks.offset[n.row]), int(chunks.length[n.row])) for n in members]
            if pack in whole_packs:
                ranges.append(self._tail(pack))
            for span in coalesce(ranges, self._options.gap_bytes, self._options.span_bytes):
                has_tail = pack in whole_packs and len(members) in span.members
                inside = tuple(members[i] for i in span.members if i < len(members))
                spans.append(_Span(pack, span.start, span.length, inside, ranges[-1][1] if has_tail else 0))
        return spans

    def _tail(self, pack: int) -> tuple[int, int]:
        """Return (start, length) of what follows the last chunk of a pack that this snapshot knows."""
        chunks, size = self._manifest.chunks, self._manifest.packs[pack].size_bytes
        rows = np.flatnonzero(chunks.pack == pack)
        start = int((chunks.offset[rows] + chunks.length[rows].astype(np.uint64)).max()) if rows.size else 0
        start = max(start, size - _LONGEST_TAIL_BYTES)
        return start, size - start

    def _read_span(self, span: _Span, deliver: Callable[[ChunkNeed, torch.Tensor], None]) -> None:
        buffer = self._buffer(span.length)
        memory = memory_of(buffer)[: span.length]
        self._get(span.pack, span.start, memory)
        chunks = self._manifest.chunks
        with torch.no_grad():
            for need in span.needs:
                start = int(chunks.offset[need.row]) - span.start
                stored = memory[start : start + int(chunks.length[need.row])]
                deliver(need, self._verified(need, stored, buffer, start))
        if span.tail_bytes:
            self._prove_whole(span.pack, bytes(memory[span.length - span.tail_bytes :]))
        with self._lock:
            self.counters.bytes_read += span.length - span.tail_bytes
            self.counters.bytes_footers += span.tail_bytes
            self.counters.chunks += len(span.needs)

    def _prove_whole(self, number: int, tail: bytes) -> None:
        """Check the footer of a pack, of which ``tail`` are the last bytes; reads more where that is not all of it."""
        pack = self._manifest.packs[number]
        try:
            if not check_tail(tail, name=pack.name, object_size_bytes=pack.size_bytes):
                self._read_footer(self._backend, pack)
        except CorruptionError as error:
            if not self._again(pack_key(pack.name), lambda copy: self._read_footer(copy, pack)):
                raise error from None

    def _read_footer(self, backend: Backend, pack: PackRecord) -> bool:
        entries = loop.run(read_footer(backend, pack.name, pack.size_bytes))
        with self._lock:
            self.counters.requests += 1
            self.counters.bytes_footers += footer_bytes(len(entries))
        return True

    def _verified(self, need: ChunkNeed, stored: memoryview, buffer: torch.Tensor, start: int) -> torch.Tensor:
        """Return the raw bytes of a chunk after its digest was found right; reads it again where it is not."""
        raw = self._decoded(need, stored)
        if raw is not None:
            width = item_bytes(self._manifest.tensors[need.tensor].dtype)
            if raw is stored and start % width == 0:
                return buffer[start : start + len(stored)]
            return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        chunks = self._manifest.chunks
        pack, offset = int(chunks.pack[need.row]), int(chunks.offset[need.row])

        def ask(copy: Backend) -> Buffer | None:
            memory = memoryview(bytearray(len(stored)))
            self._get(pack, offset, memory, copy)
            return self._decoded(need, memory)

        sound = self._again(pack_key(self._manifest.packs[pack].name), ask)
        if sound is None:
            raise self._damaged(need)
        return torch.frombuffer(bytearray(sound), dtype=torch.uint8)

    def _again(self, key: str, ask: Callable[[Backend], T | None]) -> T | None:
        """Return what the first copy of the store gives that is right, or None if none does."""
        with self._lock:
            self.counters.reread += 1
        loop.run(self._backend.forget(key))
        problem: VeScaleError | None = None
        for number, copy in enumerate(self._backend.copies()):
            try:
                found = ask(copy)
            except (ObjectNotFoundError, CorruptionError, StorageError) as error:
                problem = error if number == 0 else problem
                continue
            if found is not None:
                if number:
                    self._healed(key, copy)
                return found
        if problem is not None:
            raise problem
        return None

    def _healed(self, key: str, copy: Backend) -> None:
        with self._lock:
            self.counters.healed += 1
        logger.warning(
            "%s in %s is damaged: a part was read from the mirror %s - repair the store with heal()",
            key,
            self._backend.url,
            copy.url,
        )

    def _decoded(self, need: ChunkNeed, stored: memoryview) -> Buffer | None:
        """Return the raw bytes, or None where they are not what the manifest says."""
        chunks = self._manifest.chunks
        width = item_bytes(self._manifest.tensors[need.tensor].dtype)
        raw_bytes = need.box.volume * width
        try:
            raw = decode_chunk(stored, Codec(int(chunks.codec[need.row])), raw_bytes)
        except CorruptionError:
            return None
        return raw if digest(raw) == chunks.digest[need.row].tobytes() else None

    def _damaged(self, need: ChunkNeed) -> CorruptionError:
        manifest, chunks = self._manifest, self._manifest.chunks
        name = fqn(manifest.tensors[need.tensor].path)
        key = pack_key(manifest.packs[int(chunks.pack[need.row])].name)
        where = " and ".join(copy.url for copy in self._backend.copies())
        return CorruptionError(
            f"cannot load '{name}' {need.box} of {manifest.run}@{manifest.step}: the bytes at offset "
            f"{int(chunks.offset[need.row])} of {key} in {where} do not have the digest "
            f"{chunks.digest[need.row].tobytes().hex()[:16]}... that was saved, on two reads - the storage changed "
            "them; load another snapshot, or bring the object back from a copy",
            fqn=name,
            box=need.box,
            key=key,
        )

    def _get(self, pack: int, start: int, memory: memoryview, backend: Backend | None = None) -> None:
        key = pack_key(self._manifest.packs[pack].name)
        began = time.monotonic()
        try:
            loop.run((backend or self._backend).get_into(key, start, memory))
        except (ObjectNotFoundError, CorruptionError, StorageError) as error:
            raise self._about(pack, error) from error
        with self._lock:
            self.counters.requests += 1
            self.counters.seconds_storage += time.monotonic() - began

    def _about(self, pack: int, error: ObjectNotFoundError | CorruptionError | StorageError) -> VeScaleError:
        """Return the error with the object that could not be read and the tensors that it holds."""
        manifest = self._manifest
        key = pack_key(manifest.packs[pack].name)
        names = sorted({fqn(manifest.tensors[t].path) for t in self._tensors_in(pack)})
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        what = error.message if key in error.message else f"{key}: {error.message}"
        about: dict[str, Any] = {"phase": f"loading {manifest.run}@{manifest.step}", **error.context, "key": key}
        if isinstance(error, StorageError):
            about["retryable"] = error.retryable
        return type(error)(
            f"cannot load {manifest.run}@{manifest.step}: {what} - it holds parts of {', '.join(names[:3])}{more}",
            **about,
        )

    def _tensors_in(self, pack: int) -> set[int]:
        chunks = self._manifest.chunks
        rows = np.flatnonzero(chunks.pack == pack)
        return {int(t) for t in np.searchsorted(chunks.first, rows, side="right") - 1}

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Return this thread's buffer, grown where a span is larger than any before."""
        buffer: torch.Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            self._local.buffer = buffer
        return buffer
