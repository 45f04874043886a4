import asyncio
import time
import uuid

import pytest

from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.errors import ConfigError
from vescale_storage.testing import BackendConformance, keys_of, read
from vescale_storage.wrappers import latency
from vescale_storage.wrappers.latency import Latency, LatencyBackend


class TestConformance(BackendConformance):
    def make(self):
        return LatencyBackend(MemoryBackend(uuid.uuid4().hex), Latency(request_seconds=0.0001))


def test_seconds():
    assert Latency(request_seconds=0.5).seconds(10**9) == 0.5
    assert Latency(request_seconds=0.5, bytes_per_second=100).seconds(50) == 1.0


@pytest.mark.parametrize("wrong", [{"request_seconds": -1}, {"bytes_per_second": 0}, {"request_seconds": float("nan")}])
def test_impossible_latencies(wrong):
    with pytest.raises(ConfigError):
        Latency(**wrong)


def test_every_verb_waits_for_its_bytes(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(latency.asyncio, "sleep", sleep)

    async def check():
        backend = LatencyBackend(MemoryBackend(uuid.uuid4().hex), Latency(request_seconds=1, bytes_per_second=10))
        await backend.put("k", [b"12345", b"12345"])
        await backend.put_if_absent("l", [b"12345"])
        await backend.get("k")
        await read(backend, "k", 0, 2)
        await backend.head("k")
        await keys_of(backend, "")
        await backend.delete("k")

    asyncio.run(check())
    assert waits == [2, 1.5, 2, 1.2, 1, 1, 1]


def test_requests_beside_each_other_wait_once():
    async def check():
        backend = LatencyBackend(MemoryBackend(uuid.uuid4().hex), Latency(request_seconds=0.1))
        began = time.monotonic()
        await asyncio.gather(*(backend.put(f"k{number}", [b"x"]) for number in range(10)))
        assert 0.09 < time.monotonic() - began < 0.9

    asyncio.run(check())
