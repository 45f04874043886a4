"""C020 to C024: ranks that hold nothing of a tensor, and parameters whose memory is not there."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import vescale_ckpt as vc
from tests.cases.inputs import blank_at, coordinate_of, local_of, same_bits, tagged, view_at
from tests.cases.worlds import RUN, load, memory_store, save
from vescale_ckpt.errors import InvalidInputError, MismatchError
from vescale_ckpt.layout.layout import Layout, local_shape
from vescale_ckpt.layout.placement import Replicate, Shard


class TestC020FewerRowsThanRanks:
    @pytest.mark.parametrize(("shape", "world_size"), [((6,), 4), ((3, 5), 8), ((1, 17), 4), ((1,), 8), ((9,), 8)])
    def test_every_world_size_loads(self, shape, world_size):
        full = tagged(*shape)
        rows = Layout((world_size,), (Shard(0),))
        store = memory_store()
        save(store, world_size, lambda rank: {"w": view_at(full, rows, (rank,))})
        for num_ranks in sorted({1, 2, 3, 5, world_size}):
            target = Layout((num_ranks,), (Shard(0),))
            found = {}

            def blank(rank: int, target: Layout = target, found: dict = found) -> dict:
                found[rank], view = blank_at(full, target, (rank,))
                return {"w": view}

            load(store, num_ranks, blank)
            for rank, local in found.items():
                assert same_bits(local, local_of(full, target, (rank,)))

    def test_an_empty_rank_has_zero_rows_and_the_other_dims(self):
        assert local_shape(Layout((4,), (Shard(0),)), (6,), (3,)) == (0,)
        assert local_shape(Layout((8,), (Shard(0),)), (3, 5), (7,)) == (0, 5)
        assert local_shape(Layout((4,), (Shard(0),)), (1, 17), (1,)) == (0, 17)

    @pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2), (0, 0)])
    def test_tensors_without_elements(self, shape):
        full = torch.empty(shape, dtype=torch.bfloat16)
        store = memory_store()
        save(store, 3, lambda rank: {"w": view_at(full, Layout((3,), (Shard(0),)), (rank,)), "copy": full, "x": 1})
        assert store[RUN].tensors()["w"].shape == shape
        target = {"w": torch.empty(shape, dtype=torch.bfloat16), "copy": torch.empty_like(full), "x": 0}
        load(store, 1, lambda _: target)
        assert target["x"] == 1
        wrong = {"w": torch.empty((*shape, 1), dtype=torch.bfloat16), "copy": torch.empty_like(full), "x": 0}
        with pytest.raises(MismatchError, match="'w'"):
            load(store, 1, lambda _: wrong)

    def test_a_world_of_which_one_rank_holds_everything(self):
        full = tagged(5, 3)
        store = memory_store()

        def only(rank: int, owner: int, local: torch.Tensor) -> dict:
            return {"w": vc.ShardedView((5, 3), torch.float32, [((0, 0), local)] if rank == owner else [])}

        save(store, 4, lambda rank: only(rank, 2, full))
        local = torch.zeros(5, 3)
        load(store, 3, lambda rank: only(rank, 1, local))
        assert same_bits(local, full)


class TestC022FullDictIntoUnevenRows:
    @pytest.mark.parametrize("shape", [(1, 17), (5, 17), (8, 17), (3, 2)])
    @pytest.mark.parametrize("tensor_parallel_dim", [0, 1])
    def test_every_rank_gets_its_slice(self, shape, tensor_parallel_dim):
        full = tagged(*shape)
        store = memory_store()
        save(store, 1, lambda _: {"w": full})
        layout = Layout((4, 2), (Shard(0), Shard(tensor_parallel_dim)), order=(1, 0))
        found = {}

        def blank(rank: int) -> dict:
            found[rank], view = blank_at(full, layout, coordinate_of(layout, rank))
            return {"w": view}

        load(store, 8, blank)
        for rank, local in found.items():
            right = local_of(full, layout, coordinate_of(layout, rank))
            assert same_bits(local, right)
        assert any(local.shape[0] == 0 for local in found.values()) or shape[0] == 8

    def test_the_reverse_gives_the_full_dict(self):
        full = tagged(5, 17)
        layout = Layout((4, 2), (Shard(0), Replicate()))
        store = memory_store()
        save(store, 8, lambda rank: {"w": view_at(full, layout, coordinate_of(layout, rank))})
        assert same_bits(store[RUN].state_dict()["w"], full)


class TestC024MemoryThatIsNotThere:
    def frozen(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model

    def refused(self, model: nn.Module, words: str) -> None:
        store = memory_store()
        with pytest.raises(InvalidInputError, match=words) as caught:
            save(store, 1, lambda _: {"model": model})
        assert "model.0.weight" in str(caught.value)
        assert store.newest(RUN) is None

    def test_released_storage_is_refused(self):
        model = self.frozen()
        model[0].weight.untyped_storage().resize_(0)
        self.refused(model, "released")

    def test_a_partly_released_storage_is_refused(self):
        model = self.frozen()
        model[0].weight.untyped_storage().resize_(8)
        self.refused(model, "released")

    def test_a_placeholder_of_zero3_is_refused(self):
        model = self.frozen()
        model[0].weight.ds_status, model[0].weight.ds_shape = "NOT_AVAILABLE", (3, 4)
        model[0].weight.data = torch.empty(0)
        self.refused(model, "ZeRO-3")

    def test_a_parameter_on_meta_is_refused(self):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 3))
        self.refused(model, "meta")

    def test_a_placeholder_cannot_pass_for_the_tensor_on_load(self):
        store = memory_store()
        save(store, 1, lambda _: {"model": self.frozen()})
        target = self.frozen()
        target[0].weight.data = torch.empty(0)
        with pytest.raises(MismatchError, match=r"model\.0\.weight"):
            load(store, 1, lambda _: {"model": target})

    def test_frozen_weights_are_there_in_full(self):
        store = memory_store()
        model = self.frozen()
        save(store, 1, lambda _: {"model": model})
        whole = store[RUN].state_dict()["model"]
        for (name, parameter), (stored_name, stored) in zip(model.state_dict().items(), whole.items(), strict=True):
            assert name == stored_name
            assert same_bits(parameter, stored)


def test_the_inputs_are_what_the_cases_say():
    assert [local_of(tagged(6), Layout((4,), (Shard(0),)), (r,)).shape[0] for r in range(4)] == [2, 2, 2, 0]
    assert list(itertools.accumulate([2, 2, 2, 0]))[-1] == 6
