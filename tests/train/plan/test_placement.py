"""Placements in JSON, and the interleaved one."""

from __future__ import annotations

import pytest
from torch.distributed.tensor.placement_types import Partial

from vescale_train.errors import PlanError
from vescale_train.plan.placement import Interleaved, Replicate, Shard, decode, encode, is_interleaved, parts_of


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(-1), Interleaved(1, 3), Interleaved(0, 1)])
def test_there_and_back(placement):
    assert decode(encode(placement)) == placement


def test_an_interleaved_one_knows_its_parts():
    assert is_interleaved(Interleaved(1, 3))
    assert parts_of(Interleaved(1, 3)) == 3
    assert not is_interleaved(Shard(1))
    assert parts_of(Shard(1)) == 1
    with pytest.raises(PlanError, match="cannot interleave 0 parts"):
        Interleaved(0, 0)


@pytest.mark.parametrize("record", [None, {}, {"kind": "shard"}, {"kind": "replicate", "dim": 0}, {"kind": "partial"}])
def test_other_records_are_refused(record):
    with pytest.raises(PlanError, match="cannot read a placement"):
        decode(record)


def test_terms_of_a_sum_are_no_part_of_a_plan():
    with pytest.raises(PlanError, match="a plan cannot hold"):
        encode(Partial())
