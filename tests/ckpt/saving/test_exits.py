from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

import vescale_ckpt as vc

SCRIPT = """
import json, logging, os, signal, sys, time, torch
import vescale_ckpt as vc
from vescale_ckpt.store import Store
from vescale_storage.backends import open_backend
from vescale_storage.errors import NoSpaceError
from vescale_storage.wrappers.faults import FaultBackend

def begin(url):
    faults = FaultBackend(open_backend(url))
    ckpt = vc.Checkpointer(Store(faults, exists=False), "run")
    ckpt.save(0, {"w": torch.zeros(3)})
    return faults, ckpt

def save(ckpt):
    ckpt.save(1, {"w": torch.ones(3)}, blocking=False)

def finished(url):
    faults, ckpt = begin(url)
    faults.delay("put_if_absent", 0.5, prefix="packs/", times=9)
    save(ckpt)

def failed(url):
    faults, ckpt = begin(url)
    faults.delay("put_if_absent", 0.3, prefix="packs/")
    faults.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/")
    save(ckpt)

def failed_before(url):
    faults, ckpt = begin(url)
    faults.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/")
    ckpt.save(1, {"w": torch.ones(3)}, blocking=False).wait_done()

def asked(url):
    vc.finish_on_sigterm()
    faults, ckpt = begin(url)
    faults.delay("put_if_absent", 0.5, prefix="packs/", times=9)
    save(ckpt)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def unasked(url):
    faults, ckpt = begin(url)
    faults.delay("put_if_absent", 30.0, prefix="packs/", times=9)
    save(ckpt)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def closed(url):
    faults, ckpt = begin(url)
    save(ckpt)
    ckpt.close()

results = {}
for case in (finished, failed, failed_before, asked, unasked, closed):
    folder = os.path.join(sys.argv[1], case.__name__)
    os.mkdir(folder)
    pid = os.fork()
    if pid == 0:
        log = os.open(os.path.join(folder, "log"), os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 2)
        logging.basicConfig(level=logging.ERROR)
        case(os.path.join(folder, "store"))
        sys.exit(0)
    results[case.__name__] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(results))
"""
"""One interpreter that forks every case: each ends in its own way, and the import of torch is paid once."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return by case (exit status, what it wrote to standard error, steps that are committed)."""
    folder = tmp_path_factory.mktemp("exits")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, timeout=300, check=True
    )
    found = {}
    for case, status in json.loads(done.stdout).items():
        steps = [info.step for info in vc.open_store(folder / case / "store").snapshots("run")]
        found[case] = status, (folder / case / "log").read_text(), steps
    return found


def test_a_save_under_way_is_finished_before_the_interpreter_ends(ended):
    """The function that made the checkpointer has returned by then, and nothing refers to it any more."""
    assert ended["finished"] == (0, "", [0, 1])


@pytest.mark.parametrize("case", ["failed", "failed_before"])
def test_one_that_failed_and_that_nobody_was_told_of_is_reported(ended, case):
    status, log, steps = ended[case]
    assert "at exit: the save of run@1 failed: disk full" in log
    assert (status, steps) == (0, [0])


def test_sigterm_finishes_saves_where_that_was_asked_for(ended):
    assert ended["asked"] == (128 + signal.SIGTERM, "", [0, 1])


def test_without_that_it_ends_the_process_at_once_and_nothing_is_lost(ended):
    assert ended["unasked"] == (-signal.SIGTERM, "", [0])


def test_a_closed_checkpointer_is_not_waited_for(ended):
    assert ended["closed"] == (0, "", [0, 1])
