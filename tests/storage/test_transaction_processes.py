"""Three real processes over a folder; one of them is killed before its fragment."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from vescale_storage import loop, refs
from vescale_storage.backends import open_backend
from vescale_storage.transaction import find_transactions, new_transaction_id

RANK = """
import json, sys, time
from vescale_storage import loop, refs
from vescale_storage.backends import open_backend
from vescale_storage.errors import VeScaleError
from vescale_storage.transaction import Transaction

path, transaction, rank, world_size, deadline, behaviour = json.loads(sys.argv[1])
backend = open_backend(path)
txn = Transaction(backend, transaction, world_size)
print("ready", flush=True)
if behaviour == "hang":
    time.sleep(600)

async def save():
    if behaviour == "fail":
        await txn.abort(rank, "disk full", "no_space")
        return None
    await txn.write_fragment(rank, b"fragment of %d" % rank)
    if rank:
        return await txn.await_commit("run", 5, deadline)
    contents = await txn.collect(deadline)
    assert contents == [b"fragment of %d" % other for other in range(world_size)]
    ref = await refs.create_ref(backend, "run", 5, manifest="ab" * 32, transaction=transaction, now=1.0)
    await txn.clean()
    return ref

try:
    ref = loop.run(save())
    print(json.dumps({"version": ref and ref.version}), flush=True)
except VeScaleError as error:
    failures = getattr(error, "failures", {})
    print(json.dumps({"error": error.kind, "failures": failures, "text": str(error)}), flush=True)
"""


@dataclasses.dataclass
class Rank:
    process: subprocess.Popen[str]

    def wait_ready(self):
        assert self.process.stdout.readline() == "ready\n"

    def outcome(self, timeout_seconds):
        self.process.wait(timeout_seconds)  # not communicate(): it forgets what readline() has read ahead
        assert self.process.returncode == 0, self.process.stderr.read()
        return json.loads(self.process.stdout.read())


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the ranks of one save; ends those that are left."""
    transaction = new_transaction_id()
    ranks = []

    def start_ranks(behaviours, deadline_seconds):
        for rank, behaviour in enumerate(behaviours):
            arguments = [str(tmp_path), transaction, rank, len(behaviours), deadline_seconds, behaviour]
            command = [sys.executable, "-c", RANK, json.dumps(arguments)]
            ranks.append(Rank(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
        for rank in ranks:
            rank.wait_ready()
        return ranks

    yield start_ranks
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


def test_three_processes_commit_one_snapshot(start, tmp_path):
    ranks = start(["save"] * 3, 60)
    assert [rank.outcome(60) for rank in ranks] == [{"version": 1}] * 3
    backend = open_backend(tmp_path)
    assert loop.run(refs.latest_ref(backend, "run")).step == 5
    assert loop.run(find_transactions(backend)) == ()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_killed_before_its_fragment_is_named_by_all_others_in_bounded_time(start, tmp_path, victim):
    deadline_seconds = 3
    ranks = start(["hang" if rank == victim else "save" for rank in range(3)], deadline_seconds)
    begun = time.monotonic()
    os.kill(ranks[victim].process.pid, signal.SIGKILL)
    outcomes = [rank.outcome(60) for number, rank in enumerate(ranks) if number != victim]
    assert time.monotonic() - begun < deadline_seconds + 15
    for outcome in outcomes:
        assert outcome["error"] == "rank_failure"
        assert outcome["failures"].keys() == {str(victim)}
        assert f"rank {victim}" in outcome["text"]
    assert ranks[victim].process.wait(10) == -signal.SIGKILL
    assert loop.run(refs.list_refs(open_backend(tmp_path), "run")) == ()


def test_a_process_that_fails_ends_the_others_long_before_their_deadline(start):
    begun = time.monotonic()
    ranks = start(["save", "save", "fail"], 300)
    outcomes = [rank.outcome(60) for rank in ranks]
    assert time.monotonic() - begun < 60
    assert outcomes[2] == {"version": None}
    for outcome in outcomes[:2]:
        assert outcome["failures"] == {"2": "no_space: disk full"}
