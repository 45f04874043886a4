import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch import Command, Job, JobError, free_port

WAIT = "import pathlib, sys, time, os; pathlib.Path(sys.argv[1], os.environ['RANK']).touch(); time.sleep(60)"


@pytest.fixture
def command(tmp_path):
    def make(code, timeout_seconds=20.0):
        script = tmp_path / "script.py"
        script.write_text(code)
        return Command(
            script=script,
            arguments=(str(tmp_path),),
            num_ranks=2,
            log_folder=tmp_path / "logs",
            timeout_seconds=timeout_seconds,
        )

    return make


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_get_what_torchrun_would_give_them(command, tmp_path):
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"
    with Job(
        command(f"import os; print(*(os.environ[n] for n in {names}), 0 < int(os.environ['MASTER_PORT']))")
    ) as job:
        job.wait()
    assert (tmp_path / "logs" / "rank-0.log").read_text().split() == ["0", "0", "2", "127.0.0.1", "True"]
    assert (tmp_path / "logs" / "rank-1.log").read_text().split() == ["1", "1", "2", "127.0.0.1", "True"]


def test_a_failed_rank_ends_the_job_and_shows_its_log(command):
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such luck')\ntime.sleep(60)"
    with Job(command(code)) as job, pytest.raises(JobError, match=r"(?s)rank 1 ended with code 1.*no such luck"):
        job.wait()
    assert all(rank.returncode is not None for rank in job._ranks)


def test_a_job_that_takes_too_long_is_killed(command):
    with Job(command(WAIT, timeout_seconds=0.2)) as job, pytest.raises(JobError, match=r"not done after 0\.2 s"):
        job.wait()
    assert all(rank.returncode == -signal.SIGKILL for rank in job._ranks)


def test_leaving_the_block_kills_what_runs(command):
    with Job(command(WAIT)) as job:
        pids = [rank.pid for rank in job._ranks]
        assert job.is_running()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_frozen_job_stands_still_until_it_is_thawed_or_killed(command):
    with Job(command(WAIT)) as job:
        ranks = [psutil.Process(rank.pid) for rank in job._ranks]
        job.freeze()
        until(lambda: all(rank.status() == psutil.STATUS_STOPPED for rank in ranks))
        job.thaw()
        until(lambda: all(rank.status() != psutil.STATUS_STOPPED for rank in ranks))
        job.freeze()
        job.kill()
        assert not any(rank.is_running() for rank in ranks)


def test_no_rank_survives_the_death_of_its_launcher(command, tmp_path):
    job = command(WAIT)
    starter = f"""
import sys, time
sys.path.insert(0, {str(Path(sys.modules["launch"].__file__).parent)!r})
from pathlib import Path
from launch import Command, Job
with Job(Command(script=Path({str(job.script)!r}), arguments=({str(tmp_path)!r},), num_ranks=2,
                 log_folder=Path({str(tmp_path / "logs")!r}), timeout_seconds=60)) as job:
    print(*(rank.pid for rank in job._ranks), flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as launcher:
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        os.kill(launcher.pid, signal.SIGKILL)
    assert len(pids) == 2
    until(lambda: not any(_lives(pid) for pid in pids))


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_free_ports_are_outside_the_range_of_outgoing_connections():
    assert 20_000 <= free_port() < 30_000
