"""What do a save to S3 and loads from it cost, cold, and again with a cache on disk?"""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp

import vescale_ckpt as vc
from benchmarks.case import DCP, OURS, Case, Question, Ratio, against
from benchmarks.measure import measure
from benchmarks.peers import RUN, quiet
from benchmarks.states import (
    blank_like,
    change,
    gpt_shapes,
    num_layers,
    require_equal,
    spoil,
    state_bytes,
    with_moments,
)
from vescale_tools.seaweed import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.bench import Bench
    from benchmarks.case import Scale
    from benchmarks.measure import Sample
    from benchmarks.states import State

OBSTORE = f"{OURS}, obstore"
CACHED, CACHED_OBSTORE = f"{OURS}, cache warm", f"{OBSTORE}, cache warm"
_BUCKET = "bench"


@dataclass(frozen=True, kw_only=True, slots=True)
class S3(Case):
    """Saves to, or loads from, a server on this machine."""

    saves: bool


def cases(scale: Scale) -> Sequence[S3]:
    del scale
    saves = (
        against("save CPU / DCP", "cpu_seconds", DCP),
        Ratio(name="save CPU, obstore / DCP", of=(OBSTORE, "cpu_seconds"), to=(DCP, "cpu_seconds")),
    )
    loads = (
        against("load CPU / DCP", "cpu_seconds", DCP),
        Ratio(name="load CPU, obstore / DCP", of=(OBSTORE, "cpu_seconds"), to=(DCP, "cpu_seconds")),
        Ratio(
            name="bytes from storage with a warm cache / without",
            of=(CACHED, "bytes_read"),
            to=(OURS, "bytes_read"),
            at_most=0.01,
            exact=True,
        ),
        Ratio(name="load wall, warm cache / cold", of=(CACHED, "wall_seconds"), to=(OURS, "wall_seconds")),
    )
    return (
        S3(name="save", storage="s3", saves=True, ratios=saves),
        S3(name="load", storage="s3", saves=False, ratios=loads),
    )


def run(case: S3, bench: Bench) -> None:
    shapes = gpt_shapes(256, num_layers(bench.scale.s3_bytes, 256, 4096), 4096)
    if bench.scale.name == "tiny":
        shapes = gpt_shapes(64, 1, 256, 64)
    state = with_moments(shapes)
    with SeaweedServer(bench.folder / "server") as server:
        server.create_bucket(_BUCKET)
        places = _Places(bench.folder, server.storage_options)
        sides = _savers(places, state, bench) if case.saves else _loaders(places, state, bench)
        bench.compare(sides)


@dataclass(frozen=True, slots=True)
class _Places:
    folder: Path
    storage_options: dict[str, Any]

    def open(self, name: str, client: str, cache: bool = False) -> vc.Store:
        """Return the store of a name, over a client."""
        options = self.storage_options | ({} if client == "s3fs" else {"client": client})
        more: Any = {"cache_dir": self.folder / f"cache-{client}"} if cache else {}
        return vc.open_store(f"s3://{_BUCKET}/{name}", storage_options=options, **more)

    def dcp(self, *, reads: bool) -> Any:
        """Return DCP's reader or writer over fsspec."""
        from torch.distributed.checkpoint import _fsspec_filesystem as fsspec_files  # noqa: PLC0415 -- has no public name

        made = fsspec_files.FsspecReader if reads else fsspec_files.FsspecWriter
        return made(f"s3://{_BUCKET}/dcp", **self.storage_options)


def _clients(bench: Bench, names: dict[str, str]) -> dict[str, str]:
    """Return side -> client of those that can take part."""
    if importlib.util.find_spec("obstore") is None:
        for side in [side for side, client in names.items() if client == "obstore"]:
            bench.leave_out(side, "obstore is not installed")
    return {side: client for side, client in names.items() if side not in bench.missing}


def _savers(places: _Places, state: State, bench: Bench) -> dict[str, Callable[[int], Sample]]:
    def ours(client: str) -> Callable[[int], Sample]:
        store = places.open(f"save-{client}", client)
        checkpointer = vc.Checkpointer(store, RUN)

        def act(turn: int) -> Sample:
            change(state)
            before = _counts(store)
            with measure() as taken:
                checkpointer.save(turn, state).result()
            found = _counts(store) - before
            taken.counters |= {"requests": found.num_requests, "bytes_sent": found.up_bytes}
            taken.counters["bytes_needed"] = state_bytes(state)
            return taken.sample

        return act

    def theirs(turn: int) -> Sample:
        del turn
        change(state)
        with quiet(), measure() as taken:
            dcp.save(dict(state), storage_writer=places.dcp(reads=False))
        return taken.sample

    chosen = _clients(bench, {OURS: "s3fs", OBSTORE: "obstore"})
    return {**{side: ours(client) for side, client in chosen.items()}, DCP: theirs}


def _loaders(places: _Places, state: State, bench: Bench) -> dict[str, Callable[[int], Sample]]:
    target = blank_like(state)
    with places.open("load", "s3fs") as store, vc.Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(0, state).result()
    with quiet():
        dcp.save(dict(state), storage_writer=places.dcp(reads=False))

    def ours(client: str, *, cache: bool) -> Callable[[int], Sample]:
        def act(turn: int) -> Sample:
            spoil(target)
            with measure() as taken, places.open("load", client, cache) as store, vc.Checkpointer(store, RUN) as reader:
                reader.load(target)
                found = _counts(store)
            taken.counters |= {"requests": found.num_requests, "bytes_read": found.down_bytes}
            taken.counters["bytes_needed"] = state_bytes(state)
            if turn == 0:
                require_equal(target, state)
            return taken.sample

        return act

    def theirs(turn: int) -> Sample:
        spoil(target)
        with quiet(), measure() as taken:
            dcp.load(target, storage_reader=places.dcp(reads=True))
        if turn == 0:
            require_equal(target, state)
        return taken.sample

    names = {OURS: "s3fs", OBSTORE: "obstore", CACHED: "s3fs", CACHED_OBSTORE: "obstore"}
    if "cache_dir" not in inspect.signature(vc.open_store).parameters:
        for side in (CACHED, CACHED_OBSTORE):
            bench.leave_out(side, "this version has no cache")
    shutil.rmtree(places.folder / "cache-s3fs", ignore_errors=True)
    chosen = _clients(bench, names)
    made = {side: ours(client, cache=side in {CACHED, CACHED_OBSTORE}) for side, client in chosen.items()}
    return {**made, DCP: theirs}


def _counts(store: vc.Store) -> Any:
    counts = store.counts
    assert counts is not None, "the store does not count"  # noqa: S101 -- a mistake of the benchmark
    return counts


QUESTION = Question(
    name="s3",
    title="S3",
    text=(
        "SeaweedFS on 127.0.0.1, so wall says little and CPU and requests say much; the server's CPU is not counted. "
        "Loads open the store anew each time. With a cache the first load fills it (its turn is kept apart), and the "
        "next ones ask the storage for the newest snapshot's ref alone. DCP goes through its fsspec reader and writer, "
        "over the same s3fs."
    ),
    cases=cases,
    run=run,
    columns=("requests", "bytes_sent", "bytes_read", "bytes_needed"),
)
