"""C096 to C102: conversions that depended on the layout, on what an opaque state was, on padding, or on names."""

from __future__ import annotations

import io
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import vescale_ckpt as vc
from tests.cases.inputs import same_bits, tagged, view_at
from tests.cases.worlds import RUN, load, memory_store, save
from tests.modules import WithExtra
from vescale_ckpt.errors import MismatchError, NotFoundError
from vescale_ckpt.interop.safetensors import check_target, export_snapshot, load_hf, plan_export
from vescale_ckpt.layout.layout import Layout
from vescale_ckpt.layout.placement import Shard


def exported(store, folder):
    """Return the files of an export, by name."""
    snapshot = store[RUN]
    export_snapshot(snapshot, plan_export(snapshot.manifest), check_target(folder))
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class TestC096PlainAndShardedAlike:
    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_one_rank_and_several_convert_to_the_same_files(self, tmp_path, num_ranks):
        full = {
            "up.weight": tagged(12, 6),
            "up.bias": tagged(12),
            "norm": tagged(1),
            "half": tagged(7, dtype=torch.half),
        }

        def state(num: int, rank: int) -> dict:
            if num == 1:
                return {"model": full}
            layout = Layout((num,), (Shard(0),))
            return {"model": {name: view_at(tensor, layout, (rank,)) for name, tensor in full.items()}}

        found = []
        for num in (1, num_ranks):
            store = memory_store()
            save(store, num, lambda rank, num=num: state(num, rank))
            found.append(exported(store, tmp_path / str(num)))
        assert found[0] == found[1]
        assert all(
            same_bits(tensor, full[name]) for name, tensor in load_file(tmp_path / "1/model.safetensors").items()
        )


class TestC098OpaqueExtraState:
    @pytest.mark.parametrize(
        "value", [io.BytesIO(b"opaque"), io.BytesIO(), torch.empty(0, dtype=torch.uint8), b"", b"x" * 9000, None, {}]
    )
    def test_it_is_carried_as_it_is_and_empty_stays_empty(self, value):
        store = memory_store()
        save(store, 1, lambda _: {"experts": nn.ModuleList([WithExtra(value), WithExtra(b"")])})
        target = nn.ModuleList(
            [WithExtra(type(value)() if isinstance(value, io.BytesIO | dict) else value), WithExtra(None)]
        )
        load(store, 1, lambda _: {"experts": target})
        found = target[0].value
        assert type(found) is type(value)
        if isinstance(value, io.BytesIO):
            assert found.getvalue() == value.getvalue()
        elif isinstance(value, torch.Tensor):
            assert same_bits(found, value)
        else:
            assert found == value
        assert target[1].value == b""

    def test_where_it_is_absent_that_is_told_and_not_fatal_if_said_so(self):
        store = memory_store()
        save(store, 1, lambda _: {"m": {"w": torch.zeros(2)}})
        target = WithExtra("mine")
        with pytest.raises(MismatchError, match=r"'m\._extra_state'"):
            load(store, 1, lambda _: {"m": target})
        (report,) = load(store, 1, lambda _: {"m": target}, ignore=["*_extra_state"])
        assert (target.value, target.w.tolist()) == ("mine", [0, 0])
        assert any("_extra_state" in note for note in report.notes)


class TestC100VocabularyPadding:
    VOCAB, WIDTH, MULTIPLE = 63, 4, 8

    def shard(self, full: torch.Tensor, num: int, rank: int) -> tuple[torch.Tensor, vc.ShardedView]:
        """Return a rank's padded rows, garbage in the padding, and the view of those that are real."""
        rows = -(-self.VOCAB // (self.MULTIPLE * num)) * self.MULTIPLE
        first, last = min(rank * rows, self.VOCAB), min((rank + 1) * rows, self.VOCAB)
        local = torch.full((rows, self.WIDTH), -7.0)
        local[: last - first] = full[first:last]
        real = local[: last - first]
        return local, vc.ShardedView((self.VOCAB, self.WIDTH), torch.float32, [((first, 0), real)] if len(real) else [])

    @pytest.mark.parametrize("savers", [1, 2, 4])
    @pytest.mark.parametrize("loaders", [1, 2, 4])
    def test_it_is_never_stored_and_each_layout_pads_anew(self, tmp_path, savers, loaders):
        full = tagged(self.VOCAB, self.WIDTH)
        store = memory_store()
        save(store, savers, lambda rank: {"model": {"embed": self.shard(full, savers, rank)[1]}})
        (exported,) = load_hf_of(store, tmp_path).values()
        assert same_bits(exported, full), "63 rows and none of padding"
        targets = [self.shard(torch.zeros_like(full), loaders, rank) for rank in range(loaders)]
        load(store, loaders, lambda rank: {"model": {"embed": targets[rank][1]}})
        for rank, (local, _) in enumerate(targets):
            assert same_bits(local, self.shard(full, loaders, rank)[0])


def load_hf_of(store, folder):
    exported(store, folder / "hf")
    return load_hf(folder / "hf")["model"]


class TestC102NamesOfFilesAndKeys:
    def folder(self, path, *, missing=False):
        parts = {"a.safetensors": {"x.weight": tagged(3, 2)}, "b-part.safetensors": {"y": tagged(5), "z": tagged(1)}}
        path.mkdir()
        for name, tensors in parts.items():
            if not (missing and name == "b-part.safetensors"):
                save_file(tensors, path / name)
        index = {tensor: name for name, tensors in parts.items() for tensor in tensors}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return {name: tensor for tensors in parts.values() for name, tensor in tensors.items()}

    def test_shards_of_any_name_are_read_and_key_paths_stay(self, tmp_path):
        full = self.folder(tmp_path / "hf")
        found = load_hf(tmp_path / "hf")
        assert found.keys() == {"model"}
        assert found["model"].keys() == full.keys()
        assert all(same_bits(found["model"][name], tensor) for name, tensor in full.items())

    def test_what_is_missing_is_told_before_anything_is_read(self, tmp_path):
        self.folder(tmp_path / "hf", missing=True)
        with pytest.raises(NotFoundError, match=r"b-part\.safetensors"):
            load_hf(tmp_path / "hf")

    @pytest.mark.parametrize("nested", [True, False])
    def test_a_state_with_and_without_a_level_of_its_own_has_the_same_names_outside(self, tmp_path, nested):
        full = {"x.weight": tagged(3, 2), "y": tagged(5)}
        store = memory_store()
        save(store, 1, lambda _: {"model": full} if nested else full)
        assert load_hf_of(store, tmp_path).keys() == full.keys()
