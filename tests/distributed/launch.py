"""Worlds of real processes that talk over gloo: one interpreter imports torch once and forks the ranks.

``launch`` is for tests; run as a script, this file is the interpreter that forks. Nothing outlives the deadline: the
whole process group is killed, after every rank has said where it stands.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

START_SECONDS = 90.0
"""For the import of torch on a loaded machine, beside the deadline of the ranks themselves."""
GRACE_SECONDS = 10.0
"""How long the others may go on after a rank has failed."""


class WorldError(AssertionError):
    """A rank failed, or the world did not end in time; the text has what the ranks wrote."""


def launch(function: str, world_size: int, *, deadline_seconds: float, **arguments: Any) -> list[Any]:
    """Run ``path.py:name(**arguments)`` on every rank of a new world and return what each returned, by rank.

    Arguments and results are JSON. The file is named as seen from the folder of this one.
    """
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        spec = {
            "function": function,
            "world_size": world_size,
            "deadline_seconds": deadline_seconds,
            "arguments": arguments,
            "folder": folder,
        }
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(spec)], stdout=out, stderr=out, start_new_session=True
            )
            try:
                code = process.wait(START_SECONDS + deadline_seconds + 2 * GRACE_SECONDS)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        if code:
            text = log.read_text(errors="replace")
            raise WorldError(f"{function} on {world_size} ranks ended with {code}:\n{text[-12000:]}")
        return [json.loads((Path(folder) / f"result-{rank}").read_text()) for rank in range(world_size)]


def main(spec: dict[str, Any]) -> int:
    """Fork the ranks, wait for them, and return 0 if all went well."""
    import torch  # noqa: PLC0415 - once, for all ranks

    torch.set_num_threads(1)
    file, _, name = spec["function"].partition(":")
    module_spec = importlib.util.spec_from_file_location(Path(file).stem, Path(__file__).parent / file)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    ranks: dict[int, int] = {}
    for rank in range(spec["world_size"]):
        pid = os.fork()
        if pid == 0:
            os._exit(run_rank(getattr(module, name), rank, spec))
        ranks[pid] = rank
    return watch(ranks, spec["deadline_seconds"])


def run_rank(body: Any, rank: int, spec: dict[str, Any]) -> int:
    """Be one rank; return its exit status."""
    import torch.distributed as dist  # noqa: PLC0415

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder = Path(spec["folder"])
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(spec["world_size"])}
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=spec["world_size"]
        )
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


def watch(ranks: dict[int, int], deadline_seconds: float) -> int:
    """Wait for the ranks; kill what is left soon after a failure, or at the deadline."""
    end = time.monotonic() + deadline_seconds
    failed: list[str] = []
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = ranks.pop(pid)
            if status:
                failed.append(f"rank {rank} ended with status {status}")
                end = min(end, time.monotonic() + GRACE_SECONDS)
        elif time.monotonic() > end:
            failed.append(f"ranks {sorted(ranks.values())} did not end")
            for signal_number, pause in ((signal.SIGUSR1, 1.0), (signal.SIGKILL, 0.0)):
                for pid in ranks:
                    os.kill(pid, signal_number)
                time.sleep(pause)
            break
        else:
            time.sleep(0.02)
    sys.stderr.write("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
