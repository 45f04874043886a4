from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vescale_train.ddp import DistributedDataParallel
from vescale_train.errors import ConfigError, StateError
from vescale_train.optim import MuonByOwner
from vescale_train.optim.muon import share_out


@given(st.lists(st.integers(1, 1000), max_size=20), st.integers(1, 6), st.data())
def test_every_matrix_has_an_owner_and_no_rank_much_more_than_another(costs, num_ranks, data):
    axis_sizes = [data.draw(st.sampled_from([1, 2])) for _ in costs]
    owners = share_out(costs, num_ranks, axis_sizes)
    assert all(0 <= rank < num_ranks and 0 <= at < size for (rank, at), size in zip(owners, axis_sizes, strict=True))
    if set(axis_sizes) <= {1}:
        loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == (r, 0)) for r in range(num_ranks)]
        assert max(loads) - min(loads) <= max(costs, default=0)


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match="over 0 ranks"):
        share_out([1], 0, [1])


def test_what_is_not_muon_and_what_has_stepped_is_refused():
    model = nn.Linear(2, 2, bias=False)
    ddp = DistributedDataParallel(model)
    with pytest.raises(ConfigError, match=r"is for torch\.optim\.Muon"):
        MuonByOwner(torch.optim.SGD(model.parameters()), ddp)
    other = nn.Linear(2, 2, bias=False)
    sharded = DistributedDataParallel(other, use_distributed_optimizer=True)
    with pytest.raises(ConfigError, match="needs whole gradients"):
        MuonByOwner(torch.optim.Muon(other.parameters()), sharded)
    stepped = torch.optim.Muon(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    ddp.finish_grad_sync()
    stepped.step()
    with pytest.raises(StateError, match="has state already"):
        MuonByOwner(stepped, ddp)


@pytest.mark.distributed
def test_matrices_with_one_owner_each_train_as_plain_muon_and_save_as_it(more_world):
    found = [rank["muon"] for rank in more_world]
    assert all(len(rank) == 10 and all(rank.values()) for rank in found), found[0]
