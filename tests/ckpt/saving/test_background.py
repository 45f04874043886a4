from __future__ import annotations

import logging
import threading
import uuid

import pytest
import torch

import vescale_ckpt as vc
from vescale_ckpt.errors import (
    ConflictError,
    CorruptionError,
    MismatchError,
    NoSpaceError,
    RankFailureError,
    StorageError,
    StorageTimeoutError,
)
from vescale_ckpt.saving.background import _may_pass
from vescale_ckpt.store import Store
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.wrappers.faults import FaultBackend


@pytest.fixture
def faults():
    return FaultBackend(MemoryBackend(uuid.uuid4().hex))


def checkpointer(faults, **options):
    return vc.Checkpointer(Store(faults, exists=False), "run", options=vc.SaveOptions(**options))


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "vescale_ckpt")


def test_one_thread_does_all_saves_and_ends_when_it_is_closed(faults):
    before = set(threading.enumerate())
    ckpt = checkpointer(faults)
    for step in range(3):
        ckpt.save(step, {"w": torch.ones(2)}, blocking=False)
    made = [t for t in set(threading.enumerate()) - before if t.name == "vescale-save"]
    assert len(made) == 1
    assert made[0].daemon
    ckpt.close()
    assert not made[0].is_alive()


def test_what_failed_in_storage_is_written_again_from_memory(faults):
    tensor = torch.rand(100)
    expected = tensor.clone()
    ckpt = checkpointer(faults, retries=2)
    faults.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/", times=2)
    handle = ckpt.save(1, {"w": tensor}, blocking=False)
    tensor.zero_()
    assert handle.result().attempts == 3
    assert torch.equal(ckpt.store["run@1"].read("w"), expected)


def test_what_is_not_of_storage_is_not_tried_again(faults):
    ckpt = checkpointer(faults, retries=2)
    rule = faults.fail("put_if_absent", CorruptionError("damaged"), prefix="packs/", times=5)
    with pytest.raises(CorruptionError, match="damaged"):
        ckpt.save(1, {"w": torch.ones(2)})
    assert rule.num_hit == 1


def test_a_failure_may_be_only_warned_of(faults, caplog):
    caplog.set_level(logging.WARNING, "vescale_ckpt")
    ckpt = checkpointer(faults, on_failure="warn")
    faults.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/")
    ckpt.save(1, {"w": torch.ones(2)}, blocking=False).wait_done()
    assert ckpt.save(2, {"w": torch.ones(2)}).result().step == 2
    assert "the save of run@1 failed: disk full" in caplog.text


STORAGE = StorageError("x").kind


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (NoSpaceError("full"), True),
        (StorageTimeoutError("late"), True),
        (ConflictError("marked"), True),
        (RankFailureError("x", failures={1: "no_space: full"}), True),
        (RankFailureError("x", failures={1: "timeout: late", 2: f"{STORAGE}: broken"}), True),
        (RankFailureError("x", failures={1: "left no fragment"}), True),
        (RankFailureError("x", failures={0: "mismatch: copies differ"}), False),
        (RankFailureError("x", failures={0: "corruption: a chunk", 1: "no_space: full"}), False),
        (RankFailureError("x", failures={2: "MemoryError: no memory"}), False),
        (RankFailureError("x"), True),
    ],
    ids=str,
)
def test_all_ranks_judge_by_what_failed_first_whether_to_try_again(error, passes):
    assert _may_pass(error) is passes


def test_kinds_of_errors_that_pass_are_those_of_their_classes():
    told = {cls.kind: cls for cls in (NoSpaceError, ConflictError, MismatchError)}
    assert _may_pass(RankFailureError("x", failures={1: f"{told['no_space'].kind}: y"}))
    assert not _may_pass(RankFailureError("x", failures={1: f"{MismatchError.kind}: y"}))
