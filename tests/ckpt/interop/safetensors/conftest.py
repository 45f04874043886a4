from __future__ import annotations

import itertools

import pytest

import vescale_ckpt as vc

_numbers = itertools.count()


@pytest.fixture
def saved():
    """Save a state to a store of its own in memory and return the snapshot."""
    stores = []

    def save(state, url=None, **options):
        store = vc.open_store(url or f"memory://interop-{next(_numbers)}")
        stores.append(store)
        with vc.Checkpointer(store, "run", options=vc.SaveOptions(**options)) as checkpointer:
            checkpointer.save(7, state)
        return store["run@7"]

    yield save
    for store in stores:
        store.close()
