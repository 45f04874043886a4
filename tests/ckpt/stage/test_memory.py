from __future__ import annotations

import threading
import time

import pytest
import torch

from vescale_ckpt.errors import StorageTimeoutError
from vescale_ckpt.stage.memory import BufferPool


def test_a_buffer_that_came_back_is_used_again():
    pool = BufferPool(1000, None)
    first = pool.take(1.0)
    assert (first.dtype, first.shape, first.device.type) == (torch.uint8, (1000,), "cpu")
    pool.give_back(first)
    assert pool.take(1.0) is first
    assert pool.take(1.0) is not first


def test_a_bounded_pool_gives_no_more_than_it_may():
    pool = BufferPool(10, 2)
    taken = [pool.try_take(), pool.try_take()]
    assert None not in taken
    assert pool.try_take() is None
    pool.give_back(taken[0])
    assert pool.try_take() is taken[0]


def test_an_unbounded_pool_gives_as_many_as_are_asked_for():
    pool = BufferPool(10, None)
    taken = [pool.try_take() for _ in range(50)]
    assert len({id(buffer) for buffer in taken}) == 50
    assert pool.peak_bytes == 500


def test_the_peak_is_what_was_in_use_at_one_time():
    pool = BufferPool(100, None)
    assert pool.peak_bytes == 0
    a, b = pool.take(1.0), pool.take(1.0)
    pool.give_back(a)
    pool.take(1.0)
    assert pool.peak_bytes == 200
    pool.give_back(b)
    pool.reset_peak()
    assert pool.peak_bytes == 100
    pool.take(1.0)
    assert pool.peak_bytes == 200


def test_a_taker_waits_until_one_comes_back():
    pool = BufferPool(10, 1)
    first = pool.take(1.0)
    timer = threading.Timer(0.2, pool.give_back, [first])
    timer.start()
    began = time.monotonic()
    assert pool.take(30.0) is first
    assert 0.1 < time.monotonic() - began < 10
    timer.join()


def test_waiting_ends_at_the_deadline_with_the_reason():
    pool = BufferPool(64, 1)
    pool.take(1.0)
    with pytest.raises(StorageTimeoutError, match=r"within 0.3 s - all 1 of 64 bytes wait for storage - raise"):
        pool.take(0.3)


def test_who_waits_may_give_up():
    pool = BufferPool(64, 1)
    pool.take(1.0)
    calls = []

    def give_up():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the save is lost")

    with pytest.raises(RuntimeError, match="the save is lost"):
        pool.take(30.0, give_up)
    assert len(calls) == 3


def test_nobody_is_asked_who_need_not_wait():
    BufferPool(64, 1).take(1.0, lambda: pytest.fail("asked"))


def test_trimming_frees_what_is_not_in_use_and_keeps_the_bound():
    pool = BufferPool(10, 2)
    a, b = pool.take(1.0), pool.take(1.0)
    pool.give_back(a)
    pool.trim()
    assert pool.try_take() is not a
    assert pool.try_take() is None
    pool.give_back(b)
    assert pool.try_take() is b


def test_threads_never_share_a_buffer_and_never_exceed_the_bound():
    pool = BufferPool(8, 3)
    out, most, errors = set(), [0], []
    lock = threading.Lock()

    def work(number):
        for _ in range(200):
            buffer = pool.take(30.0)
            with lock:
                if id(buffer) in out:
                    errors.append("shared")
                out.add(id(buffer))
                most[0] = max(most[0], len(out))
            buffer.fill_(number)
            if not bool((buffer == number).all()):
                errors.append("overwritten")
            with lock:
                out.discard(id(buffer))
            pool.give_back(buffer)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert most[0] <= 3
    assert pool.peak_bytes <= 24
