"""FSDP's first generation as source and target, in real worlds of 2 and 3 ranks."""

from __future__ import annotations

import itertools

import pytest

from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed
LAYOUTS = ("one bucket", "in blocks", "kept gathered", "not sharded", "checkpointed", "fsdp2", "ddp")


@pytest.mark.parametrize(
    ("savers", "loaders", "targets"), [(3, 2, LAYOUTS), (2, 3, ("in blocks", "fsdp2"))], ids=["3 to 2", "2 to 3"]
)
def test_it_loads_what_others_saved_and_others_load_what_it_saved(tmp_path, savers, loaders, targets):
    """The worlds compare all parameters and moments to the bit, with what torch itself gathers."""
    saved = launch("fsdp1.py:save_all", savers, deadline_seconds=200, folder=str(tmp_path))
    rows = launch("fsdp1.py:load_all", loaders, deadline_seconds=300, folder=str(tmp_path), targets=targets)[0]
    assert {(a, b) for a, b, _ in rows} == {*itertools.product(saved[0]["runs"], [*targets, "alone"])}
    losses = [loss for _, _, loss in rows]
    assert max(losses) - min(losses) < 1e-5 * max(losses), "training goes on as it would have"
    for rank in saved:
        found = rank["refused"]
        assert "use_orig_params=True" in found["without names"]
        assert "between two steps" in found["summoned"]
        assert found["after"] == "saved"
