from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.threads import all_well, run_ranks
from vescale_ckpt.coordinate import group as groups
from vescale_ckpt.coordinate.group import SoloGroup, TorchGroup, default_group
from vescale_ckpt.errors import ConfigError, CorruptionError, RankFailureError, StateError


def as_bytes(text):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def collectives(group):
    """Return what every kind of collective gives on one rank."""
    rank, size = group.rank, group.world_size
    outgoing = [as_bytes(bytes([rank, other]) * (other + 1)) for other in range(size)]
    received = group.exchange(outgoing, [2 * (rank + 1)] * size)
    return (
        group.all_gather_fixed(bytes([rank])),
        group.all_gather(b"x" * rank),
        group.all_gather(b""),
        group.broadcast(b"from root" if rank == size - 1 else None, root=size - 1),
        group.broadcast(b""),
        [bytes(t.numpy()) for t in received],
    )


def expected(rank, size):
    return (
        [bytes([r]) for r in range(size)],
        [b"x" * r for r in range(size)],
        [b""] * size,
        b"from root",
        b"",
        [bytes([r, rank]) * (rank + 1) for r in range(size)],
    )


def test_one_process_is_a_group_of_itself():
    assert collectives(SoloGroup()) == expected(0, 1)
    SoloGroup().close()


@pytest.mark.parametrize("size", [2, 5])
def test_lengths_may_differ_and_the_root_may_be_any(size):
    assert all_well(run_ranks(size, collectives)) == [expected(rank, size) for rank in range(size)]


def test_what_went_well_everywhere_is_returned_after_one_collective():
    def body(group):
        return group.attempt("trying", lambda: group.rank * 10), group.num_collectives

    assert all_well(run_ranks(3, body)) == [(0, 1), (10, 1), (20, 1)]


@pytest.mark.parametrize(
    "error", [CorruptionError("bad chunk", key="k"), ValueError("not ours"), KeyError("k"), OSError()]
)
def test_an_error_of_any_class_on_one_rank_is_raised_on_all(error):
    """Capturing runs the caller's own ``state_dict``; a rank that died of it in silence left the others waiting."""

    def body(group):
        def do():
            if group.rank == 1:
                raise error

        group.attempt("reading", do)

    began = time.monotonic()
    outcomes = run_ranks(3, body)
    assert time.monotonic() - began < 5
    assert outcomes[1] is error
    for rank in (0, 2):
        assert isinstance(outcomes[rank], RankFailureError)
        assert outcomes[rank].failures == {1: f"{type(error).__name__}: {error}"}
        assert "reading failed on other ranks - rank 1" in str(outcomes[rank])


def test_several_errors_are_each_raised_at_home_and_know_of_one_another():
    def body(group):
        def do():
            if group.rank != 1:
                raise CorruptionError(f"bad on {group.rank}")

        group.attempt("reading", do)

    outcomes = run_ranks(3, body)
    assert [str(outcomes[rank]) for rank in (0, 2)] == ["bad on 0", "bad on 2"]
    assert set(outcomes[0].context["failures"]) == {0, 2}
    assert set(outcomes[1].failures) == {0, 2}


def test_the_end_of_the_interpreter_is_no_error_to_agree_on():
    def body(group):
        def do():
            raise KeyboardInterrupt

        try:
            group.attempt("reading", do)
        except KeyboardInterrupt:
            return group.num_collectives
        return None

    assert all_well(run_ranks(1, body)) == [0]


def num_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_torch_distributed_there_is_one_process():
    assert not dist.is_initialized()
    assert isinstance(default_group(None, 1.0), SoloGroup)


@pytest.mark.usefixtures("world_of_one")
def test_torch_ranks_close_what_they_open():
    made = default_group(None, 10.0)
    assert isinstance(made, TorchGroup)
    assert collectives(made) == expected(0, 1)
    made.close()
    made.close()
    with pytest.raises(StateError, match="anew"):
        made.all_gather_fixed(b"")
    before = num_open_files()
    for _ in range(20):
        TorchGroup(dist.group.WORLD, 10.0).close()
    assert num_open_files() == before


@pytest.mark.usefixtures("world_of_one")
def test_groups_of_the_same_ranks_have_different_names_and_other_ranks_do_not_count():
    first = [groups._next_name(ranks) for ranks in ([0, 1], [0, 1, 2], [0, 1])]
    assert len(set(first)) == 3
    assert first[0].rpartition("/")[2] == first[1].rpartition("/")[2] == "1"
    assert first[2].rpartition("/")[2] == "2"


@pytest.mark.usefixtures("world_of_one")
def test_a_process_outside_the_group_is_refused():
    with pytest.raises(ConfigError, match="not one of the ranks"):
        TorchGroup(dist.GroupMember.NON_GROUP_MEMBER, 1.0)


@pytest.mark.usefixtures("world_of_one")
def test_a_broken_connection_is_a_failure_of_the_ranks(monkeypatch):
    made = TorchGroup(None, 10.0)

    class Broken:
        def allgather(self, *_):
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(made, "_gloo", Broken())
    with pytest.raises(RankFailureError, match=r"all-gather over 1 ranks failed on rank 0 - .*10 s.*Connection closed"):
        made.all_gather_fixed(b"x")
