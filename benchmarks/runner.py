"""The runner: every case in a process of its own, on the storage that it asks for, within its deadline."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import environment
from benchmarks.bench import Bench
from benchmarks.case import Scale
from benchmarks.measure import storage_of
from benchmarks.questions import BY_NAME
from benchmarks.results import CaseResult, Run, conclude

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.case import Case, Question

_GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Places:
    """Where cases may write."""

    disk: Path
    tmpfs: Path

    def under(self, storage: str) -> Path:
        """Return the folder for a kind of storage; what needs none gets the fast one for its scratch."""
        return self.disk if storage in {"disk", "s3"} else self.tmpfs


def default_places() -> Places:
    """Return a temporary folder on disk and one in memory.

    Raises:
        RuntimeError: no folder of the kind can be found.
    """
    disk, tmpfs = Path(tempfile.gettempdir()), Path("/dev/shm")  # noqa: S108 -- each case makes its own folder in it
    if storage_of(disk) != "disk":
        raise RuntimeError(f"{disk} is in memory: set TMPDIR to a folder on disk, which is what is to be measured")
    return Places(disk, tmpfs if tmpfs.is_dir() else disk)


def run_case(question: Question, case: Case, scale: Scale, places: Places) -> CaseResult:
    """Return what one case comes to, run in this process."""
    with _scratch(places.under(case.storage)) as folder:
        bench = Bench(scale, case.repeats or scale.repeats, folder)
        question.run(case, bench)
        found = conclude(question, case, bench)
    return dataclasses.replace(found, load_average=environment.load_average())


def run_all(
    chosen: Sequence[Question],
    scale: Scale,
    places: Places,
    *,
    only: Callable[[str], bool],
    on_result: Callable[[CaseResult, float], None],
) -> Run:
    """Run the cases of some questions, each in a process of its own, and return all results.

    Args:
        chosen: the questions.
        scale: how large everything is.
        places: where to write.
        only: whether to run a case, by ``question/case``.
        on_result: called with each result and the seconds that it took.
    """
    described = environment.describe()
    results = []
    for question in chosen:
        for case in question.cases(scale):
            if not only(f"{question.name}/{case.name}"):
                continue
            began = time.monotonic()
            result = _in_a_child(question, case, scale, places)
            on_result(result, time.monotonic() - began)
            results.append(result)
    return Run(scale=scale.name, environment=described, results=tuple(results))


def _in_a_child(question: Question, case: Case, scale: Scale, places: Places) -> CaseResult:
    with _scratch(places.disk) as folder:
        out, log = folder / "result.json", folder / "log"
        spec = {
            "question": question.name,
            "case": case.name,
            "scale": dataclasses.asdict(scale),
            "disk": str(places.disk),
            "tmpfs": str(places.tmpfs),
            "out": str(out),
        }
        with log.open("wb") as stream:
            process = subprocess.Popen(  # noqa: S603 - our own command line
                [sys.executable, "-m", "benchmarks.runner", json.dumps(spec)],
                cwd=environment.ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            why = _wait(process, case.deadline_seconds)
        if out.exists() and not why:
            return CaseResult.from_json(json.loads(out.read_text(encoding="utf-8")))
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = why or f"ended with {process.returncode}"
        failed = f"{why}: " + "\n".join(lines[-15:])
        return CaseResult(question=question.name, case=case.name, storage=case.storage, failed=failed)


def _wait(process: subprocess.Popen[bytes], deadline_seconds: float) -> str:
    """Wait for a child and end it and all that it started at the deadline; return what went wrong."""
    try:
        process.wait(deadline_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # it removes its files
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return f"took more than {deadline_seconds:g} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_GRACE_SECONDS)
        raise
    return ""


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="vescale-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(text: str) -> int:
    """Run the case that a JSON object names, and write its result where that says."""
    # A deadline ends in an exception, so that folders are removed and children are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    spec = json.loads(text)
    warnings.simplefilter("ignore")  # peers warn of what they do; the test suite is where ours count
    scale = Scale(**spec["scale"])
    question = BY_NAME[spec["question"]]
    case = next(case for case in question.cases(scale) if case.name == spec["case"])
    places = Places(Path(spec["disk"]), Path(spec["tmpfs"]))
    try:
        result = run_case(question, case, scale, places)
    except Exception:  # noqa: BLE001 -- the end of a process: its last words are the result
        traceback.print_exc()
        return 1
    Path(spec["out"]).write_text(json.dumps(result.to_json()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
