"""Puts and deletes in one folder at the same time: the folder comes and goes, and no put fails by that."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vescale_storage import loop
from vescale_storage.backends.local import LocalBackend
from vescale_storage.errors import StorageError


@pytest.mark.parametrize("durable", [True, False])
def test_a_folder_that_is_deleted_and_made_all_the_time(tmp_path, durable):
    backends = [LocalBackend(tmp_path / "store", durable=durable) for _ in range(4)]
    begin = threading.Barrier(len(backends))

    def work(number: int) -> None:
        begin.wait()
        for turn in range(150):
            key = f"gc/deep/{number}-{turn}"
            loop.run((backends[number].put if turn % 2 else backends[number].put_if_absent)(key, [b"x"]))
            loop.run(backends[number].delete(key))

    with ThreadPoolExecutor(len(backends)) as pool:
        for future in [pool.submit(work, number) for number in range(len(backends))]:
            future.result()


def test_an_object_with_the_name_of_a_folder_is_still_told(tmp_path):
    backend = LocalBackend(tmp_path)
    loop.run(backend.put("a", [b"x"]))
    with pytest.raises(StorageError, match="lie under an object"):
        loop.run(backend.put("a/b", [b"x"]))
