"""Worlds of real processes that talk over gloo: one interpreter imports torch once and forks the ranks.

``launch`` is for questions; run as a script, this file is the interpreter that forks. Ranks print nothing unless they
fail, and nothing outlives the deadline.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import ROOT
from benchmarks.measure import Measurement, Sample, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_START_SECONDS = 120.0
"""For the import of torch on a loaded machine, beside the deadline of the ranks themselves."""
_GRACE_SECONDS = 15.0
"""How long the others may go on after a rank has failed."""

Samples = dict[str, list[dict[str, Any]]]
"""What a rank returns: side -> its turns, as JSON."""


def launch(
    body: Callable[..., Any], world_size: int, *, deadline_seconds: float = 600.0, **arguments: Any
) -> list[Any]:
    """Run ``body(**arguments)`` on every rank of a new world and return what each returned, by rank.

    ``body`` is a function of a module; arguments and results are JSON.

    Raises:
        RuntimeError: a rank failed or the world did not end in time; with what the ranks wrote.
    """
    with tempfile.TemporaryDirectory(prefix="vescale-world-") as folder:
        spec = {
            "module": body.__module__,
            "function": body.__name__,
            "world_size": world_size,
            "deadline_seconds": deadline_seconds,
            "arguments": arguments,
            "folder": folder,
        }
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(  # noqa: S603 - our own command line
                [sys.executable, "-m", "benchmarks.worlds", json.dumps(spec)], cwd=ROOT, stdout=out, stderr=out
            )
            try:
                code = process.wait(_START_SECONDS + deadline_seconds + 2 * _GRACE_SECONDS)
            except BaseException:
                process.terminate()  # it ends its ranks
                process.wait()
                raise
        if code:
            text = log.read_text(errors="replace")
            raise RuntimeError(f"{body.__name__} on {world_size} ranks ended with {code}:\n{text[-6000:]}")
        return [json.loads((Path(folder) / f"result-{rank}").read_text()) for rank in range(world_size)]


def over_ranks(returned: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, list[Sample]]:
    """Return side -> one sample a turn, of what the ranks returned as side -> samples."""
    merged: dict[str, list[Sample]] = {}
    for side in returned[0]:
        turns = zip(*(rank[side] for rank in returned), strict=True)
        merged[side] = [Sample.over_ranks([Sample.from_json(sample) for sample in turn]) for turn in turns]
    return merged


@contextmanager
def together(process_group: Any = None) -> Iterator[Measurement]:
    """Measure the body on a rank, which all begin at once and none leaves before all are through."""
    import torch.distributed as dist  # noqa: PLC0415 -- only ranks need it

    dist.barrier(process_group)
    with measure() as taken:
        yield taken
    dist.barrier(process_group)


def main(spec: dict[str, Any]) -> int:
    """Fork the ranks, wait for them, and return 0 if all went well."""
    import torch  # noqa: PLC0415 - once, for all ranks

    torch.set_num_threads(1)
    body = getattr(importlib.import_module(spec["module"]), spec["function"])
    ranks: dict[int, int] = {}
    for rank in range(spec["world_size"]):
        pid = os.fork()
        if pid == 0:
            os._exit(_be_rank(body, rank, spec))
        ranks[pid] = rank
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _watch(ranks, spec["deadline_seconds"])
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)


def _be_rank(body: Callable[..., Any], rank: int, spec: dict[str, Any]) -> int:
    """Be one rank; return its exit status."""
    import torch.distributed as dist  # noqa: PLC0415

    folder, size = Path(spec["folder"]), spec["world_size"]
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=size)
        result = body(**spec["arguments"])
        (folder / f"result-{rank}").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the end of a process
        sys.stderr.write(f"rank {rank}:\n{traceback.format_exc()}")
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _watch(ranks: dict[int, int], deadline_seconds: float) -> int:
    """Wait for the ranks, taking away those that ended; give up soon after a failure, or at the deadline."""
    end = time.monotonic() + deadline_seconds
    failed: list[str] = []
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = ranks.pop(pid)
            if status:
                failed.append(f"rank {rank} ended with status {status}")
                end = min(end, time.monotonic() + _GRACE_SECONDS)
        elif time.monotonic() > end:
            failed.append(f"ranks {sorted(ranks.values())} did not end")
            break
        else:
            time.sleep(0.01)
    sys.stderr.write("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
