from __future__ import annotations

import pytest

from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Save everything in one world, load all of it in another one; return what the loads read."""
    folder = tmp_path_factory.mktemp("matrix")
    runs = launch("matrix.py:save_all", 4, deadline_seconds=240, folder=str(folder))
    assert len(runs[0]) == 14
    return launch("matrix.py:load_all", 4, deadline_seconds=400, folder=str(folder))[0]


def test_every_layout_loads_what_every_layout_saved(rows):
    """The worlds compare every tensor to the bit; here is only counted that none was left out."""
    assert len(rows) == 9 * 9 + 5 * 5
    assert len({(saved, loaded) for saved, loaded, *_ in rows}) == len(rows)


def test_storage_gives_no_byte_twice_whatever_the_layouts(rows):
    for saved, loaded, read, needed, overhead in rows:
        assert read >= 0.99 * needed, f"{saved} on {loaded}: the count is wrong"
        assert read <= 1.05 * needed, f"{saved} on {loaded}: {read} bytes read of {needed}"
        assert read + overhead <= 1.05 * needed, f"{saved} on {loaded}: {overhead} bytes of footers"
