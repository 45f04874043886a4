"""C001 to C019: tensors that came back permuted, cut, padded or guessed after a change of layout."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import vescale_ckpt as vc
from tests.cases.inputs import bag, blank_at, chunks, coordinate_of, local_of, same_bits, tagged, view_at
from tests.cases.worlds import RUN, all_well, checkpointer, load, memory_store, save, try_load, try_save
from tests.distributed.threads import run_ranks
from vescale_ckpt.errors import CorruptionError, LayoutError, MismatchError, RankFailureError
from vescale_ckpt.execute.manifests import store_manifest
from vescale_ckpt.format.records import ChunkTable
from vescale_ckpt.layout.layout import Layout
from vescale_ckpt.layout.placement import Flat, Interleaved, Replicate, Shard, StridedShard
from vescale_storage import loop, refs

if TYPE_CHECKING:
    from vescale_ckpt.coordinate.group import Group


def ranks_of(layout: Layout) -> int:
    return len(list(itertools.product(*map(range, layout.mesh_shape))))


def moves(full: torch.Tensor, source: Layout, targets: list[Layout]) -> None:
    """Save under one layout, load under others, and require every local tensor to be the right cut."""
    store = memory_store()
    save(store, ranks_of(source), lambda rank: {"w": view_at(full, source, coordinate_of(source, rank))})
    assert same_bits(store[RUN].read("w"), full)
    for target in targets:
        locals_of_rank: dict[int, torch.Tensor] = {}

        def blank(rank: int, target: Layout = target, found: dict = locals_of_rank) -> dict:
            found[rank], view = blank_at(full, target, coordinate_of(target, rank))
            return {"w": view}

        load(store, ranks_of(target), blank)
        for rank, local in locals_of_rank.items():
            assert same_bits(local, local_of(full, target, coordinate_of(target, rank))), (target, rank)


ONE = Layout((1,), (Replicate(),))
TP_THEN_FSDP = Layout((2, 2), (Shard(0), Shard(0)), order=(1, 0))
"""Mesh (dp, tp); tensor parallel cuts first: rank (d, t) holds rows t * 8 + d * 4 and on of 16."""


class TestC001OrderOfCuts:
    @pytest.mark.parametrize("rows", [16, 15, 5, 3, 1])
    def test_the_order_of_cuts_on_one_dim_is_part_of_the_layout(self, rows):
        full = tagged(rows, 3)
        tp4, dp4 = Layout((4,), (Shard(0),)), Layout((2, 2), (Shard(0), Shard(0)))
        moves(full, TP_THEN_FSDP, [ONE, tp4, dp4, TP_THEN_FSDP])
        for back in (ONE, tp4, dp4):
            moves(full, back, [TP_THEN_FSDP])

    def test_it_holds_what_the_case_says(self):
        full = tagged(16, 3)
        for rank, (d, t) in enumerate(itertools.product(range(2), range(2))):
            local = local_of(full, TP_THEN_FSDP, coordinate_of(TP_THEN_FSDP, rank))
            assert same_bits(local, full[t * 8 + d * 4 :][:4])

    def test_a_strided_placement_says_the_same(self):
        full = tagged(16, 3)
        strided = Layout((2, 2), (StridedShard(0, 2), Shard(0)))
        store = memory_store()
        save(
            store,
            4,
            lambda rank: {
                "w": vc.ShardedView.laid_out(
                    local_of(full, TP_THEN_FSDP, coordinate_of(TP_THEN_FSDP, rank)),
                    (16, 3),
                    strided,
                    coordinate_of(strided, rank),
                )
            },
        )
        assert same_bits(store[RUN].read("w"), full)

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_any_order_of_three_cuts(self, order):
        source = Layout((2, 2, 2), (Shard(0), Shard(0), Shard(0)), order=order)
        moves(tagged(21, 2), source, [ONE, Layout((3,), (Shard(1),)), TP_THEN_FSDP])


class TestC003ExplicitRows:
    @pytest.mark.parametrize("lengths", [(1, 4, 2, 1), (0, 8, 0, 0), (8, 0, 0, 0), (3, 3, 1, 1)])
    def test_any_split_is_honoured(self, lengths):
        full = tagged(8, 3)
        starts = [0, *itertools.accumulate(lengths)]

        def explicit(rank: int) -> dict:
            rows = full[starts[rank] : starts[rank + 1]].clone()
            return {"w": vc.ShardedView((8, 3), torch.float32, [((starts[rank], 0), rows)])}

        store = memory_store()
        save(store, 4, explicit)
        assert same_bits(store[RUN].read("w"), full)
        moves(full, Layout((4,), (Shard(0, sizes=lengths),)), [ONE, Layout((3,), (Shard(0),))])

    def test_a_view_without_a_global_shape_cannot_be_made(self):
        with pytest.raises(TypeError, match="global_shape"):
            vc.ShardedView(dtype=torch.float32, pieces=[((0, 0), tagged(3, 2))])

    def test_ranks_that_state_different_global_shapes_are_refused_by_name(self):
        def guessed(rank: int) -> dict:
            local = tagged(1 if rank == 3 else 3, 2)
            shape = (local.shape[0] * 4, 2)
            return {"block.w": vc.ShardedView(shape, torch.float32, [((rank * local.shape[0], 0), local)])}

        store = memory_store()
        for outcome in try_save(store, 4, guessed):
            assert isinstance(outcome, MismatchError)
            assert "'block.w'" in str(outcome)
            assert "(12, 2)" in str(outcome)
            assert "(4, 2)" in str(outcome)
        assert store.newest(RUN) is None

    def test_a_piece_outside_the_stated_shape_is_refused(self):
        with pytest.raises(LayoutError, match="not inside the global shape"):
            vc.ShardedView((10, 2), torch.float32, [((9, 0), tagged(3, 2))])

    def test_overlaps_between_ranks_are_refused(self):
        outcomes = try_save(
            memory_store(),
            2,
            lambda rank: {"w": vc.ShardedView((6, 2), torch.float32, [((rank * 2, 0), tagged(4, 2))])},
        )
        assert all(isinstance(outcome, MismatchError) for outcome in outcomes)
        assert "overlap" in str(outcomes[0])


class TestC005Interleaved:
    SWIGLU = Interleaved(0, (8, 8))

    def layout(self, dp: int, tp: int) -> Layout:
        return Layout((dp, tp), (Shard(0), self.SWIGLU), order=(1, 0))

    def test_the_stored_tensor_is_in_order_whatever_wrote_it(self):
        full = torch.cat([tagged(8, 3), tagged(8, 3, start=1000)])
        worlds = [(2, 2), (1, 1), (4, 1), (1, 2), (2, 1)]
        for source in worlds:
            moves(full, self.layout(*source), [self.layout(*target) for target in worlds])

    def test_a_rank_holds_its_part_of_both(self):
        full = torch.cat([tagged(8, 3), tagged(8, 3, start=1000)])
        w, v = full[:8], full[8:]
        for t in range(2):
            local = local_of(full, self.layout(1, 2), (0, t))
            assert same_bits(local, torch.cat([w[t * 4 :][:4], v[t * 4 :][:4]]))

    @pytest.mark.parametrize(("groups", "tp"), [((8, 2, 2), 2), ((7, 3, 1), 4), ((5, 0, 9), 3)])
    def test_fused_parts_of_different_sizes(self, groups, tp):
        full = tagged(sum(groups), 5)
        fused = Layout((2, tp), (Shard(0), Interleaved(0, groups)), order=(1, 0))
        moves(full, fused, [ONE, Layout((3,), (Interleaved(0, groups),)), Layout((2,), (Shard(0),))])
        moves(full, ONE, [fused])


def buckets(numels: tuple[int, ...], align: int, num_ranks: int) -> tuple[list[int], int]:
    """Return (start of each parameter in the bucket, elements per rank)."""
    starts, end = [], 0
    for numel in numels:
        starts.append(end)
        end += -(-numel // align) * align
    per_rank = -(-end // num_ranks)
    return starts, -(-per_rank // align) * align


def flat_state(rank: int, num_ranks: int, fulls: list[torch.Tensor], align: int, *, fill: bool) -> tuple[dict, list]:
    """Return (state of one rank's flat shard, [(its part of a parameter, what it must be)])."""
    starts, per_rank = buckets(tuple(full.numel() for full in fulls), align, num_ranks)
    memory = torch.full((per_rank,), -1.0)
    state, expected = {}, []
    for number, (start, full) in enumerate(zip(starts, fulls, strict=True)):
        flat = Flat.in_bucket(start, full.numel(), per_rank, num_ranks)
        low, high = flat.ranges[rank]
        at = start + low - rank * per_rank
        local = memory[at : at + high - low]
        if fill:
            local.copy_(full.reshape(-1)[low:high])
        layout = Layout((num_ranks,), (flat,))
        state[f"p{number}"] = vc.ShardedView.laid_out(local, tuple(full.shape), layout, (rank,))
        expected.append((local, full.reshape(-1)[low:high]))
    return state, expected


class TestC007FlatBuckets:
    NUMELS = (7, 1, 30, 3)

    def test_padding_is_never_part_of_the_tensor(self):
        fulls = [tagged(numel, start=100 * i) for i, numel in enumerate(self.NUMELS)]
        moments = [tagged(numel, start=5000 + 100 * i) for i, numel in enumerate(self.NUMELS)]
        store = memory_store()

        def state(rank: int, num_ranks: int, *, fill: bool) -> tuple[dict, list]:
            params, first = flat_state(rank, num_ranks, fulls, 16, fill=fill)
            moment, second = flat_state(rank, num_ranks, moments, 16, fill=fill)
            return {"param": params, "exp_avg": moment}, first + second

        save(store, 2, lambda rank: state(rank, 2, fill=True)[0])
        for name, info in store[RUN].tensors().items():
            assert info.shape == (self.NUMELS[int(name[-1])],)
        by_name = store[RUN].state_dict()
        for number in range(4):
            assert same_bits(by_name["param"][f"p{number}"], fulls[number])
            assert same_bits(by_name["exp_avg"][f"p{number}"], moments[number])
        for num_ranks in (1, 2, 3, 4, 5, 8):
            found = {}

            def target(rank: int, num_ranks: int = num_ranks, found: dict = found) -> dict:
                made, found[rank] = state(rank, num_ranks, fill=False)
                return made

            load(store, num_ranks, target)
            for local, right in itertools.chain(*found.values()):
                assert same_bits(local, right)


class TestC009ListsThatDifferPerRank:
    def counts(self, rank: int) -> dict:
        return {
            "counts": [1] * (1 if rank == 0 else 5 + rank),
            "w": vc.ShardedView((4,), torch.float32, [((rank,), tagged(1))]),
        }

    def test_they_are_refused_at_save_with_the_ranks(self):
        store = memory_store()
        outcomes = try_save(store, 4, self.counts)
        assert all(isinstance(outcome, MismatchError) for outcome in outcomes)
        assert "counts" in str(outcomes[0])
        assert "rank" in str(outcomes[0])
        assert store.newest(RUN) is None

    def test_said_to_be_per_rank_they_go_back_to_their_rank(self):
        store = memory_store()
        save(store, 4, lambda rank: {"counts": vc.PerRank(self.counts(rank)["counts"])})
        targets = [{"counts": vc.PerRank([0])} for _ in range(4)]
        load(store, 4, lambda rank: targets[rank])
        assert [t["counts"].value for t in targets] == [self.counts(rank)["counts"] for rank in range(4)]

    @pytest.mark.parametrize("num_ranks", [1, 2, 8])
    def test_another_world_is_refused_unless_ignored(self, num_ranks):
        store = memory_store()
        save(store, 4, lambda rank: {"counts": vc.PerRank(self.counts(rank)["counts"])})
        outcomes = try_load(store, num_ranks, lambda _: {"counts": vc.PerRank([0])})
        assert all(isinstance(outcome, MismatchError | RankFailureError) for outcome in outcomes)
        assert "per rank, of 4 ranks" in str(outcomes[0])
        reports = load(store, num_ranks, lambda _: {"counts": vc.PerRank([0])}, ignore=["counts"])
        assert all("counts" in " ".join(report.notes) for report in reports)


class TestC011CopiesThatDiffer:
    def test_the_save_names_the_key_and_the_ranks(self):
        store = memory_store()
        values = [torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])]
        outcomes = try_save(store, 2, lambda rank: {"weight": values[rank]})
        assert all(isinstance(outcome, MismatchError | RankFailureError) for outcome in outcomes)
        assert "weight" in str(outcomes[0])
        assert "rank 0" in str(outcomes[0])
        assert "rank 1" in str(outcomes[0])
        assert store.newest(RUN) is None

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (torch.tensor(0.0), torch.tensor(-0.0)),
            (torch.tensor(float("nan")), torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)[0]),
            (1, 2),
            (1, True),
            ("a", "b"),
            (0.0, -0.0),
            (tagged(3, 2), tagged(3, 2) + 1),
        ],
    )
    def test_any_bit_counts(self, one, other):
        outcomes = try_save(memory_store(), 3, lambda rank: {"x": other if rank == 2 else one})
        assert all(isinstance(outcome, MismatchError | RankFailureError) for outcome in outcomes)
        assert any("'x'" in str(outcome) for outcome in outcomes), outcomes

    def test_equal_copies_are_one(self):
        store = memory_store()
        reports = save(store, 3, lambda _: {"x": tagged(100)})
        assert sum(report.bytes_total for report in reports) == 400

    def test_large_copies_that_differ_everywhere_are_found_without_being_asked_for(self):
        outcomes = try_save(memory_store(), 2, lambda rank: {"big": torch.full((1000, 1000), float(rank))})
        assert all(isinstance(outcome, MismatchError | RankFailureError) for outcome in outcomes)

    def test_large_copies_that_differ_anywhere_are_found_when_asked_for(self):
        def state(rank: int) -> dict:
            big = torch.zeros(1000, 1000)
            big[777, 777] = rank
            return {"big": big}

        outcomes = try_save(memory_store(), 2, state, check_replicas=True)
        assert all(isinstance(outcome, MismatchError | RankFailureError) for outcome in outcomes)

    def test_said_to_be_per_rank_each_keeps_its_own(self):
        store = memory_store()
        save(store, 2, lambda rank: {"weight": vc.PerRank(torch.tensor([2.0 * rank, 2.0 * rank + 1]))})
        targets = [{"weight": vc.PerRank(torch.zeros(2))} for _ in range(2)]
        load(store, 2, lambda rank: targets[rank])
        assert [t["weight"].value.tolist() for t in targets] == [[0.0, 1.0], [2.0, 3.0]]


class TestC013StageLocalNames:
    def layer(self, number: int) -> torch.Tensor:
        return tagged(3, 3, start=100 * number)

    def stage(self, numbers: dict[int, int] | list[int], *, fill: bool) -> torch.nn.Module:
        """Return a module with layers of some numbers, or of local number -> global number."""
        pairs = numbers.items() if isinstance(numbers, dict) else [(i, i) for i in numbers]
        return bag({f"layers.{at}.w": self.layer(i) if fill else torch.zeros(3, 3) for at, i in pairs})

    def test_stage_local_names_do_not_load_what_global_names_saved(self):
        store = memory_store()
        save(store, 1, lambda _: {"model": self.stage([0, 1, 2, 3], fill=True)})
        targets = [self.stage([0, 1], fill=False) for _ in range(2)]
        outcomes = try_load(store, 2, lambda rank: {"model": targets[rank]})
        assert all(isinstance(outcome, MismatchError) for outcome in outcomes)
        assert "layers.2.w" in str(outcomes[0])
        assert "layers.3.w" in str(outcomes[0])
        assert not any(p.any() for target in targets for p in target.parameters())

    def test_stages_that_save_under_local_names_are_refused(self):
        store = memory_store()
        outcomes = try_save(store, 2, lambda rank: {"model": self.stage({0: 2 * rank, 1: 2 * rank + 1}, fill=True)})
        assert all(isinstance(outcome, MismatchError | RankFailureError) for outcome in outcomes)
        assert "layers.0.w" in str(outcomes[0])
        assert "rank 1" in str(outcomes[0])
        assert store.newest(RUN) is None

    def test_a_stage_says_its_offset_by_renaming(self):
        store = memory_store()
        save(store, 1, lambda _: {"model": self.stage([0, 1, 2, 3], fill=True)})
        targets = [self.stage([0, 1], fill=False) for _ in range(2)]

        def body(group: Group) -> None:
            names = {f"model.layers.{i}": f"model.layers.{2 * group.rank + i}" for i in range(2)}
            checkpointer(store, group).load({"model": targets[group.rank]}, rename=names)

        all_well(run_ranks(2, body))
        for rank, target in enumerate(targets):
            for i in range(2):
                assert same_bits(target.get_parameter(f"layers.{i}.w"), self.layer(2 * rank + i))

    @pytest.mark.parametrize(
        ("num_layers", "stages", "chunks_per_stage"),
        [(7, 3, 1), (7, 3, 2), (70, 12, 1), (30, 4, 2), (2, 3, 1), (1, 1, 1), (43, 8, 2)],
    )
    def test_layers_move_between_any_stages(self, num_layers, stages, chunks_per_stage):
        def layers_of(rank: int, num_stages: int, per_stage: int) -> list[int]:
            """Layers of the virtual chunks rank, rank + num_stages, ...; empty stages are allowed."""
            parts = chunks(num_layers, num_stages * per_stage)
            return [i for v in range(per_stage) for i in range(*_range(parts[v * num_stages + rank]))]

        def state(rank: int, num_stages: int, per_stage: int, *, fill: bool) -> dict:
            return {"model": self.stage(layers_of(rank, num_stages, per_stage), fill=fill)}

        store = memory_store()
        save(store, stages, lambda rank: state(rank, stages, chunks_per_stage, fill=True))
        assert sorted(store[RUN].tensors()) == sorted(f"model.layers.{i}.w" for i in range(num_layers))
        for num_stages, per_stage in ((1, 1), (2, 1), (5, 1), (2, 3)):
            targets = {rank: state(rank, num_stages, per_stage, fill=False) for rank in range(num_stages)}
            load(store, num_stages, targets.__getitem__)
            for target in targets.values():
                for name, tensor in target["model"].named_parameters():
                    assert same_bits(tensor.detach(), self.layer(int(name.split(".")[1])))


def _range(part: tuple[int, int]) -> tuple[int, int]:
    return part[0], part[0] + part[1]


class TestC015MissingRows:
    def test_a_save_that_leaves_rows_out_is_refused_with_the_rows(self):
        store = memory_store()

        def state(rank: int) -> dict:
            rows = tagged(7, 2)[rank * 4 : rank * 4 + (4, 3)[rank]]
            return {"w": vc.ShardedView((10, 2), torch.float32, [((rank * 4, 0), rows)])}

        outcomes = try_save(store, 2, state)
        assert all(isinstance(outcome, MismatchError) for outcome in outcomes)
        assert "'w'" in str(outcomes[0])
        assert "held by no rank" in str(outcomes[0])
        assert "(7, 0)" in str(outcomes[0])
        assert store.newest(RUN) is None

    @pytest.mark.parametrize("shape", [(10, 2), (2000, 300)], ids=["one tile", "many tiles"])
    def test_a_snapshot_whose_rows_are_not_all_there_is_refused_and_nothing_is_touched(self, shape):
        full = tagged(*shape)
        store = memory_store()
        halves = Layout((2,), (Shard(0),))
        save(store, 2, lambda rank: {"w": view_at(full, halves, (rank,)), "b": tagged(3)})
        without_last_chunk(store)
        target = {"w": torch.full(shape, -1.0), "b": torch.zeros(3)}
        with pytest.raises(CorruptionError, match="missing") as caught:
            load(store, 1, lambda _: target)
        assert "'w'" in str(caught.value)
        assert (target["w"] == -1).all()
        assert not target["b"].any()
        with pytest.raises(CorruptionError, match="missing"):
            store[RUN].read("w")
        assert store[RUN].tensors()["w"].shape == shape
        assert same_bits(store[RUN].read("b"), tagged(3))


def without_last_chunk(store: vc.Store) -> None:
    """Commit the newest snapshot again as step 2, forged: without the last chunk of 'w'."""
    manifest = store[RUN].manifest
    place, chunks_now = manifest.find("w"), manifest.chunks
    gone = int(chunks_now.first[place + 1]) - 1
    keep = [row for row in range(len(chunks_now)) if row != gone]
    first = chunks_now.first.copy()
    first[place + 1 :] -= 1
    partial = [i for i, row in enumerate(chunks_now.partial_row) if row != gone]
    boxes = [chunks_now.partial_box[chunks_now.partial_start[i] : chunks_now.partial_start[i + 1]] for i in partial]
    columns = {name: getattr(chunks_now, name) for name in ChunkTable.__slots__}
    for name in ("tile", "digest", "pack", "offset", "length", "codec"):
        columns[name] = columns[name][keep]
    rows = chunks_now.partial_row[partial]
    columns |= {"first": first, "partial_row": rows - (rows > gone).astype(rows.dtype)}
    columns["partial_box"] = np.concatenate(boxes) if boxes else chunks_now.partial_box[:0]
    columns["partial_start"] = np.cumsum([0, *map(len, boxes)]).astype(np.int64)
    forged = dataclasses.replace(manifest, step=2, chunks=ChunkTable(**columns))
    name = store_manifest(store.backend, forged)
    loop.run(
        refs.create_ref(
            store.backend, RUN, 2, manifest=name, transaction=manifest.transaction, now=manifest.created_seconds
        )
    )


class TestC017CutsOfSeveralKinds:
    def test_zero3_over_tensor_parallel(self):
        full = tagged(8, 6)
        numel = 8 * 3
        flat = Flat.in_bucket(0, numel, -(-numel // 2 // 5) * 5, 2)  # 15 and 9 of each tensor-parallel half
        source = Layout((2, 2), (flat, Shard(1)), order=(1, 0))
        moves(full, source, [ONE, Layout((2,), (Shard(1),)), Layout((3,), (Shard(0),)), source])
        moves(full, ONE, [source])

    def test_experts_with_masters_and_moments(self):
        kinds = ("master", "exp_avg", "exp_avg_sq")
        full = {
            (kind, expert): tagged(4, 3, start=1000 * i + 100 * expert) + (0.001 if kind == "master" else 0)
            for i, kind in enumerate(kinds)
            for expert in range(4)
        }

        def state(rank: int, ep: int, dp: int, *, fill: bool) -> tuple[dict, list]:
            """Rank (e, d): experts of e; the optimizer's parts are flat over d, the bf16 weights are copies."""
            e, d = divmod(rank, dp)
            layout = Layout((dp,), (Flat.in_bucket(0, 12, -(-12 // dp), dp),))
            weights, optimizer, memory = {}, {}, []
            for (kind, expert), value in full.items():
                mine = expert // (4 // ep) == e
                view = vc.ShardedView((4, 3), torch.float32)
                if mine:
                    right = local_of(value, layout, (d,))
                    local = right.clone() if fill else torch.full_like(right, -1)
                    view = vc.ShardedView.laid_out(local, (4, 3), layout, (d,))
                    memory.append((local, right))
                optimizer[f"experts.{expert}.w", kind] = view
                if mine and kind == "master":
                    right = value.bfloat16()
                    weights[f"experts.{expert}.w"] = right.clone() if fill else torch.full_like(right, -1)
                    memory.append((weights[f"experts.{expert}.w"], right))
            optimizer = {name: {k: optimizer[name, k] for k in kinds} for name, _ in optimizer}
            return {"model": bag(weights), "optimizer": optimizer}, memory

        store = memory_store()
        save(store, 4, lambda rank: state(rank, 2, 2, fill=True)[0])
        whole = store[RUN].state_dict()
        for (kind, expert), value in full.items():
            assert same_bits(whole["optimizer"][f"experts.{expert}.w"][kind], value)
        for ep, dp in ((1, 1), (4, 1), (1, 3), (4, 2)):
            found = {rank: state(rank, ep, dp, fill=False) for rank in range(ep * dp)}
            load(store, ep * dp, lambda rank, found=found: found[rank][0])
            for _, memory in found.values():
                assert all(same_bits(local, right) for local, right in memory)

    def test_experts_under_local_numbers_are_refused(self):
        outcomes = try_save(
            memory_store(), 2, lambda rank: {"model": bag({"experts.0.w": tagged(4, 3, start=100 * rank)})}
        )
        assert all(isinstance(outcome, MismatchError | RankFailureError) for outcome in outcomes)
        assert "experts.0.w" in str(outcomes[0])
