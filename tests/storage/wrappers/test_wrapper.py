import asyncio
import inspect
import uuid

from vescale_storage.backend import Backend, Leftover
from vescale_storage.backends.local import LocalBackend
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.testing import BackendConformance
from vescale_storage.wrappers.wrapper import WrapperBackend


class TestConformance(BackendConformance):
    def make(self):
        return WrapperBackend(MemoryBackend(uuid.uuid4().hex))

    def make_again(self, backend):
        return MemoryBackend(backend.inner.url.removeprefix("memory://"))


def test_every_verb_is_passed_on():
    verbs = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}
    assert verbs <= set(vars(WrapperBackend))


def test_it_says_of_itself_what_the_inner_one_says():
    inner = MemoryBackend("x")
    wrapper = WrapperBackend(WrapperBackend(inner))
    assert (wrapper.url, wrapper.capabilities) == (inner.url, inner.capabilities)


def test_leftovers_are_those_of_the_inner_one(tmp_path):
    async def check():
        inner = LocalBackend(tmp_path)
        wrapper = WrapperBackend(inner)
        await wrapper.put("k", [b"x"])
        (tmp_path / ".tmp" / "left").write_bytes(b"123")
        (leftover,) = await wrapper.leftovers()
        assert isinstance(leftover, Leftover)
        await wrapper.remove_leftover(leftover)
        assert await inner.leftovers() == []
        await wrapper.close()

    asyncio.run(check())
