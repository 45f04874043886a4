import asyncio
import uuid
from dataclasses import replace

import pytest

from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.backends.probe import PROBE_PREFIX, probe_conditional_put
from vescale_storage.errors import AccessDeniedError, AlreadyExistsError
from vescale_storage.testing import keys_of
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.wrapper import WrapperBackend


class Ignoring(WrapperBackend):
    """As old servers do: the condition is not looked at."""

    async def put_if_absent(self, key, payload):
        await self.inner.put(key, payload)


class Overwriting(WrapperBackend):
    """Answers rightly, after having done the wrong thing."""

    async def put_if_absent(self, key, payload):
        try:
            await self.inner.put_if_absent(key, payload)
        except AlreadyExistsError:
            await self.inner.put(key, payload)
            raise


@pytest.mark.parametrize(("kind", "exact"), [(WrapperBackend, True), (Ignoring, False), (Overwriting, False)])
def test_what_the_storage_does_counts(kind, exact):
    inner = MemoryBackend(uuid.uuid4().hex)
    assert asyncio.run(probe_conditional_put(kind(inner))) is exact
    assert asyncio.run(keys_of(inner, "")) == []


def test_a_confession_is_believed_without_a_request():
    faulty = FaultBackend(MemoryBackend(uuid.uuid4().hex))
    faulty.capabilities = replace(faulty.capabilities, conditional_put=False)
    assert not asyncio.run(probe_conditional_put(faulty))
    assert faulty.operations == []


def test_keys_of_the_probe_are_its_own():
    faulty = FaultBackend(MemoryBackend(uuid.uuid4().hex))
    asyncio.run(probe_conditional_put(faulty))
    asyncio.run(probe_conditional_put(faulty))
    keys = {operation.key for operation in faulty.operations}
    assert len(keys) == 2
    assert all(key.startswith(PROBE_PREFIX) for key in keys)


def test_storage_that_cannot_be_written_is_an_error():
    faulty = FaultBackend(MemoryBackend(uuid.uuid4().hex))
    faulty.fail("put_if_absent", AccessDeniedError("no"))
    with pytest.raises(AccessDeniedError):
        asyncio.run(probe_conditional_put(faulty))
