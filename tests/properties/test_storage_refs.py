"""Racing creators over storage that loses answers, fails, and shows old listings."""

from __future__ import annotations

import asyncio
import uuid

from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_storage import refs
from vescale_storage.backends import open_backend
from vescale_storage.errors import AlreadyExistsError, StorageError
from vescale_storage.wrappers.faults import FaultBackend

MANIFEST = "ab" * 32

FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["lost", "lost-retried", "fail", "unreadable", "stale"]),
        st.integers(0, 3),
    ),
    max_size=3,
)
CREATORS = st.lists(st.tuples(FAULTS, st.integers(0, 3)), min_size=1, max_size=5)


def add_fault(backend: FaultBackend, fault: str, skip: int) -> None:
    if fault == "lost":
        backend.lose_answer("put_if_absent", StorageError("reset", retryable=True), skip=skip)
    elif fault == "lost-retried":
        backend.lose_answer("put_if_absent", AlreadyExistsError("a retry met its own object"), skip=skip)
    elif fault == "fail":
        backend.fail("put_if_absent", StorageError("no network", retryable=True), skip=skip)
    elif fault == "unreadable":
        backend.fail("head", StorageError("no network", retryable=True), skip=skip)
    else:
        backend.truncate("list", 2, skip=skip)


async def create(inner, number, faults, delay):
    backend = FaultBackend(inner)
    for fault, skip in faults:
        add_fault(backend, fault, skip)
    backend.delay(None, 0.0001 * delay, times=1000)
    for _ in range(20):
        try:
            return await refs.create_ref(
                backend, "run", 5, manifest=MANIFEST, transaction=f"{number:032x}", now=float(number)
            )
        except StorageError:
            continue
    raise AssertionError("twenty attempts with three faults")


@settings(deadline=None, max_examples=50)
@given(CREATORS)
def test_every_transaction_gets_exactly_the_ref_that_it_was_told(creators):
    async def main():
        inner = open_backend(f"memory://{uuid.uuid4().hex}")
        told = await asyncio.gather(
            *[create(inner, number, faults, delay) for number, (faults, delay) in enumerate(creators)]
        )
        stored = {ref.version: ref for ref in await refs.list_refs(inner, "run", strict=True, all_versions=True)}
        for number, ref in enumerate(told):
            assert stored[ref.version] == ref
            assert ref.transaction == f"{number:032x}"
        assert len({ref.version for ref in told}) == len(creators)
        assert (await refs.read_ref(inner, "run", 5)).version == max(stored)

    asyncio.run(main())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 10**12 - 1), min_size=1, max_size=12))
def test_latest_is_the_highest_number(steps):
    async def main():
        inner = open_backend(f"memory://{uuid.uuid4().hex}")
        for number, step in enumerate(steps):
            await refs.create_ref(inner, "run", step, manifest=MANIFEST, transaction=f"{number:032x}", now=1.0)
        assert (await refs.latest_ref(inner, "run")).step == max(steps)
        assert [ref.step for ref in await refs.list_refs(inner, "run")] == sorted(set(steps))

    asyncio.run(main())
