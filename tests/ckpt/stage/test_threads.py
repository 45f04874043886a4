from __future__ import annotations

import os
import subprocess
import sys

import torch

from vescale_ckpt.stage import threads

FORKS = """
import os, sys, threading, torch
from vescale_ckpt.stage.threads import settle_torch
torch.set_num_threads(2)
torch.ones(1 << 16).sum()  # the parent has a pool

def child():
    settle_torch()
    begin, failed = threading.Barrier(8), []

    def use():
        begin.wait()
        try:
            torch.ones(64, 64) @ torch.ones(64, 64)
        except RuntimeError as error:
            failed.append(error)

    users = [threading.Thread(target=use) for _ in range(8)]
    for user in users: user.start()
    for user in users: user.join()
    os._exit(bool(failed) or torch.get_num_threads() != 2)

for _ in range(30):
    pid = os.fork()
    if not pid: child()
    if os.waitpid(pid, 0)[1]: sys.exit(1)
"""


def test_threads_of_a_forked_process_find_a_pool():
    """Without settling, one fork in some dozens fails by torch's own assertion."""
    done = subprocess.run([sys.executable, "-c", FORKS], check=False, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_it_is_done_once_a_process_and_changes_nothing(monkeypatch):
    settled, calls = threads._Settled(), []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    settled.settle()
    settled.settle()
    assert calls == [torch.get_num_threads()]
    settled.forked()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    settled.settle()
    assert len(calls) == 2
