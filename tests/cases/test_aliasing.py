"""C036 to C042: tensors under several names, and views of larger memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import vescale_ckpt as vc
from tests.cases.inputs import bag, same_bits, tagged
from tests.cases.worlds import RUN, load, memory_store, save
from vescale_ckpt.errors import MismatchError
from vescale_ckpt.interop.safetensors import ExportOptions, check_target, export_snapshot, load_hf, plan_export


def saved(state: object, world_size: int = 1) -> vc.Store:
    store = memory_store()
    save(store, world_size, state if callable(state) else lambda _: state)
    return store


def stored_bytes(store: vc.Store) -> int:
    return sum(pack.size_bytes for pack in store[RUN].manifest.packs)


class Tied(nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, *, tie: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(400, 30)
        self.body = nn.Linear(30, 30)
        self.head = nn.Linear(30, 400, bias=False)
        if tie:
            self.head.weight = self.embed.weight


class TestC036Ties:
    def test_stored_once_loaded_under_both_names_and_one_again(self):
        p = nn.Parameter(tagged(400, 30))
        store = saved({"embed.weight": p, "head.weight": p})
        assert stored_bytes(store) < 1.1 * 400 * 30 * 4
        assert store[RUN].tensors()["head.weight"].alias_of == "embed.weight"
        whole = store[RUN].state_dict()
        assert whole["embed.weight"] is whole["head.weight"]
        assert same_bits(whole["head.weight"], p.detach())
        q = nn.Parameter(torch.zeros(400, 30))
        load(store, 1, lambda _: {"embed.weight": q, "head.weight": q})
        assert same_bits(q.detach(), p.detach())

    def test_a_module_stays_tied_and_its_optimizer_steps_it_once(self):
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters())
        store = saved({"model": model, "optimizer": optimizer})
        target = Tied(seed=5)
        other = torch.optim.AdamW(target.parameters())
        load(store, 1, lambda _: {"model": target, "optimizer": other})
        assert target.head.weight is target.embed.weight
        for (_, a), (_, b) in zip(model.named_parameters(), target.named_parameters(), strict=True):
            assert same_bits(a.detach(), b.detach())

    def test_the_export_says_which_name_was_left_out_and_the_import_ties_again(self, tmp_path):
        snapshot = saved({"model": Tied()})[RUN]
        plan = plan_export(snapshot.manifest, ExportOptions())
        report = export_snapshot(snapshot, plan, check_target(tmp_path / "hf"))
        assert report.num_bytes == (400 * 30 + 30 * 30 + 30) * 4
        back = load_hf(tmp_path / "hf")["model"]
        assert back["head.weight"] is back["embed.weight"]
        target = Tied(seed=5)
        load(saved({"model": back}), 1, lambda _: {"model": target})
        assert target.head.weight is target.embed.weight
        assert same_bits(target.head.weight.detach(), Tied().head.weight.detach())

    def test_ties_of_three_names_across_dicts_and_lists(self):
        t = tagged(10, 10)
        store = saved({"a": {"x": t}, "b": [t, {"y": t}], "c": t.clone()})
        whole = store[RUN].state_dict()
        assert whole["a"]["x"] is whole["b"][0] is whole["b"][1]["y"]
        assert whole["c"] is not whole["a"]["x"]

    def test_on_several_ranks(self):
        models = [Tied() for _ in range(3)]
        store = saved(lambda rank: {"model": models[rank]}, 3)
        assert store[RUN].tensors()["model.head.weight"].alias_of == "model.embed.weight"
        targets = [Tied(seed=9 + rank) for rank in range(2)]
        load(store, 2, lambda rank: {"model": targets[rank]})
        assert all(same_bits(target.head.weight.detach(), Tied().embed.weight.detach()) for target in targets)


class TestC038Views:
    def test_a_view_stores_its_own_bytes(self):
        base = torch.arange(1_000_000, dtype=torch.float32)
        state = {"slice": base[10:20], "row": base.view(1000, 1000)[3], "chunk": torch.chunk(base, 10)[7]}
        needed = sum(v.numel() * 4 for v in state.values())
        store = saved(state)
        assert stored_bytes(store) < 2 * needed + 4096
        assert stored_bytes(store) < 1.05 * needed + 4096
        whole = store[RUN].state_dict()
        assert all(same_bits(whole[key], value) for key, value in state.items())
        assert all(info.alias_of is None for info in store[RUN].tensors().values())

    def test_a_strided_or_expanded_view_too(self):
        base = torch.arange(1_000_000, dtype=torch.float32).view(1000, 1000)
        state = {"column": base[:, 5], "corner": base[:10, :10].t(), "expanded": base[:1, :1].expand(50, 50)}
        store = saved(state)
        assert stored_bytes(store) < 2 * sum(v.numel() * 4 for v in state.values()) + 4096
        assert all(torch.equal(store[RUN].state_dict()[key], value) for key, value in state.items())

    def test_overlapping_views_come_back_each_for_itself(self):
        base = tagged(100)
        store = saved({"a": base[:60], "b": base[40:], "whole": base})
        whole = store[RUN].state_dict()
        whole["a"].zero_()
        assert same_bits(whole["b"], base[40:])
        assert same_bits(whole["whole"], base)


class Shared(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight


class TestC040SharedParameters:
    def flat(self, model: nn.Module, rank: int, num_ranks: int, *, fill: bool) -> tuple[dict, list]:
        """Return the moments of a flat optimizer, in ZeRO-2's manner, for the parameters as torch lists them: once."""
        state, memory = {}, []
        for name, parameter in model.named_parameters():
            full = parameter.detach() * 0.5
            per_rank = -(-full.numel() // num_ranks)
            low, high = (min(full.numel(), per_rank * r) for r in (rank, rank + 1))
            right = full.reshape(-1)[low:high]
            local = right.clone() if fill else torch.full_like(right, -1)
            state[name] = vc.ShardedView((full.numel(),), torch.float32, [((low,), local)] if high > low else [])
            memory.append((local, right))
        return state, memory

    def test_strict_loads_both_ways(self):
        model = Shared()
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        assert "b.weight" in names
        store = saved(lambda rank: {"model": Shared(), "moments": self.flat(model, rank, 2, fill=True)[0]}, 2)
        assert sorted(store[RUN].state_dict()["model"]) == sorted(names)
        for num_ranks in (1, 3):
            target = [Shared(seed=4) for _ in range(num_ranks)]
            found = [self.flat(model, rank, num_ranks, fill=False) for rank in range(num_ranks)]
            load(
                store,
                num_ranks,
                lambda rank, target=target, found=found: {"model": target[rank], "moments": found[rank][0]},
            )
            for module, (_, memory) in zip(target, found, strict=True):
                assert module.b.weight is module.a.weight
                assert same_bits(module.a.weight.detach(), model.a.weight.detach())
                assert all(same_bits(local, right) for local, right in memory)
        consolidated = store[RUN].state_dict()["model"]
        fresh = Shared(seed=8)
        assert fresh.load_state_dict(consolidated, strict=True)
        target = Shared(seed=8)
        load(saved({"model": consolidated}), 1, lambda _: {"model": target})
        assert same_bits(target.b.weight.detach(), model.a.weight.detach())

    def test_a_list_without_duplicates_loads_into_one_with_them(self):
        model = Shared()
        once = dict(model.named_parameters())
        target = Shared(seed=3)
        load(saved({"model": once}), 1, lambda _: {"model": target})
        assert same_bits(target.b.weight.detach(), model.a.weight.detach())

    def test_two_tensors_that_differ_do_not_fit_one(self):
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        store = saved({"model": model})
        target = Shared()
        before = copy.deepcopy(target.state_dict())
        with pytest.raises(MismatchError, match=r"b\.weight"):
            load(store, 1, lambda _: {"model": target})
        assert all(same_bits(value, before[key]) for key, value in target.state_dict().items())


class TestC042WhatAnExportTies:
    def test_tied_and_equal_is_one_copy(self, tmp_path):
        snapshot = saved({"model": Tied()})[RUN]
        plan = plan_export(snapshot.manifest, ExportOptions())
        report = export_snapshot(snapshot, plan, check_target(tmp_path / "hf"))
        assert report.num_tensors == 3

    @pytest.mark.parametrize("equal", [True, False])
    def test_two_tensors_are_two_whatever_a_config_says(self, tmp_path, equal):
        model = Tied(tie=False)
        if equal:
            model.head.weight.data.copy_(model.embed.weight.data)
        snapshot = saved({"model": model})[RUN]
        export_snapshot(snapshot, plan_export(snapshot.manifest, ExportOptions()), check_target(tmp_path / "hf"))
        back = load_hf(tmp_path / "hf")["model"]
        assert same_bits(back["head.weight"], model.head.weight.detach())
        assert same_bits(back["embed.weight"], model.embed.weight.detach())
        assert back["head.weight"] is not back["embed.weight"]

    def test_the_head_on_the_last_stage_is_kept_and_equal_bytes_cost_once(self):
        weight = tagged(400, 30)

        def stage(rank: int) -> dict:
            name = ("embed.weight", "body.weight", "head.weight")[rank]
            return {"model": bag({name: tagged(30, 30) if rank == 1 else weight.clone()})}

        store = saved(stage, 3)
        assert sorted(store[RUN].tensors()) == ["model.body.weight", "model.embed.weight", "model.head.weight"]
        assert same_bits(store[RUN].read("model.head.weight"), weight)
        target = Tied(seed=3)
        load(store, 1, lambda _: {"model": target}, ignore=["model.body.bias"])
        assert target.head.weight is target.embed.weight
        assert same_bits(target.head.weight.detach(), weight)
