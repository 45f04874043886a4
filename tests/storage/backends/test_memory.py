import asyncio
import uuid

import pytest

from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.testing import BackendConformance, keys_of


class TestConformance(BackendConformance):
    def make(self):
        return MemoryBackend(uuid.uuid4().hex)

    def make_again(self, backend):
        return MemoryBackend(backend.url.removeprefix("memory://"))


def test_names_keep_stores_apart():
    async def check():
        one, other = MemoryBackend(uuid.uuid4().hex), MemoryBackend(uuid.uuid4().hex)
        await one.put("k", [b"x"])
        assert await keys_of(other, "") == []

    asyncio.run(check())


def test_listing_survives_a_deletion_half_way():
    async def check():
        backend = MemoryBackend(uuid.uuid4().hex)
        for number in range(5):
            await backend.put(f"k{number}", [b"x"])
        seen = []
        async for info in backend.list(""):
            seen.append(info.key)
            await backend.delete("k3")
        assert seen == ["k0", "k1", "k2", "k4"]

    asyncio.run(check())


def test_it_says_that_nothing_lasts():
    capabilities = MemoryBackend("x").capabilities
    assert capabilities.conditional_put
    assert not capabilities.durable
    assert not capabilities.shared


@pytest.mark.parametrize("num_bytes", [4 * 2**20, 4 * 2**20 + 1, 9 * 2**20])
def test_copies_around_the_inline_limit(num_bytes):
    async def check():
        backend = MemoryBackend(uuid.uuid4().hex)
        content = bytes(range(256)) * (num_bytes // 256) + b"z" * (num_bytes % 256)
        await backend.put("k", [content[:5], content[5:]])
        out = bytearray(num_bytes)
        await backend.get_into("k", 0, memoryview(out))
        assert out == content

    asyncio.run(check())
