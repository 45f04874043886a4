from __future__ import annotations

import threading
import time

import pytest
import torch

from vescale_ckpt.errors import InternalError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.parts import Part
from vescale_ckpt.saving.job import PartQueue
from vescale_ckpt.stage.memory import BufferPool
from vescale_ckpt.stage.stager import Slab, StagedPart


@pytest.fixture
def pool():
    return BufferPool(64, 2)


def slab_of(pool):
    return Slab(pool.try_take(), pool.give_back)


def part(number, slab=None):
    if slab is not None:
        slab.hold()
    return StagedPart(Part(number, Box((), ()), stored=True), torch.zeros(()), slab)


def num_free(pool):
    taken = []
    while (buffer := pool.try_take()) is not None:
        taken.append(buffer)
    for buffer in taken:
        pool.give_back(buffer)
    return len(taken)


def numbers(parts):
    return [part.part.tensor for part in parts]


@pytest.mark.parametrize("keep", [False, True])
def test_parts_come_in_their_order_until_the_end(keep):
    queue = PartQueue(keep=keep)
    for number in range(5):
        queue.put(part(number))
    queue.end()
    assert numbers(queue) == [0, 1, 2, 3, 4]


def test_whoever_takes_waits_for_what_is_to_come():
    queue, got = PartQueue(keep=False), []
    thread = threading.Thread(target=lambda: got.extend(numbers(queue)))
    thread.start()
    for number in range(3):
        queue.put(part(number))
        time.sleep(0.02)
    assert thread.is_alive()
    queue.end()
    thread.join(10)
    assert got == [0, 1, 2]


def test_what_staging_raised_is_raised_where_parts_are_taken():
    queue = PartQueue(keep=False)
    queue.put(part(0))
    queue.end(InternalError("staging failed"))
    with pytest.raises(InternalError, match="staging failed"):
        list(queue)


def test_kept_parts_can_be_taken_again_and_keep_their_memory(pool):
    slab = slab_of(pool)
    queue = PartQueue(keep=True)
    for number in range(3):
        queue.put(part(number, slab))
    slab.release()
    queue.end()
    for _ in range(2):
        for taken in queue:
            taken.release()
        assert num_free(pool) == 1
    queue.release()
    assert num_free(pool) == 2


def test_parts_that_are_not_kept_give_their_memory_back_one_by_one(pool):
    slab = slab_of(pool)
    queue = PartQueue(keep=False)
    for number in range(2):
        queue.put(part(number, slab))
    slab.release()
    queue.end()
    first, second = queue
    first.release()
    assert num_free(pool) == 1
    second.release()
    assert num_free(pool) == 2
    queue.release()
    assert num_free(pool) == 2, "nothing comes back twice"


@pytest.mark.parametrize("keep", [False, True])
def test_what_a_failed_save_did_not_take_gives_its_memory_back(pool, keep):
    queue = PartQueue(keep=keep)
    for number in range(2):
        slab = slab_of(pool)
        queue.put(part(2 * number, slab))
        queue.put(part(2 * number + 1, slab))
        slab.release()
    next(iter(queue))  # taken, and never released
    assert num_free(pool) == 0
    queue.release()
    assert num_free(pool) == 2


def test_what_is_staged_after_the_end_of_a_failed_save_gives_its_memory_back(pool):
    queue = PartQueue(keep=False)
    queue.release()
    slab = slab_of(pool)
    queue.put(part(0, slab))
    slab.release()
    assert num_free(pool) == 2
