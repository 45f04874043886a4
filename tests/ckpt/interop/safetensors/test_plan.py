from __future__ import annotations

import io
import json

import pytest
import torch

import vescale_ckpt as vc
from vescale_ckpt.errors import ConfigError, InvalidInputError, NotFoundError
from vescale_ckpt.interop.safetensors import ExportOptions, plan_export
from vescale_ckpt.interop.safetensors.header import parse_header
from vescale_ckpt.interop.safetensors.ties import decode_ties


def names(plan):
    return [tensor.name for tensor in plan.tensors]


def header_of(file):
    return parse_header(file.header[8:], file.num_bytes - len(file.header), file.name)


@pytest.fixture
def snapshot(saved):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    return saved({"model": model, "optimizer": {"step": torch.tensor(3), "lr": 0.1}, "epoch": 2})


def test_the_model_is_exported_by_its_own_names(snapshot):
    plan = plan_export(snapshot.manifest)
    assert (plan.snapshot, plan.select) == ("run@7", "model")
    assert names(plan) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [file.name for file in plan.files] == ["model.safetensors"]
    assert plan.index is None
    assert plan.left_out == ()
    assert plan.num_bytes == 4 * (12 + 4 + 4 + 4)
    assert plan.disk_bytes == plan.num_bytes + len(plan.files[0].header)


def test_everything_where_asked_or_where_there_is_no_model(snapshot, saved):
    plan = plan_export(snapshot.manifest, ExportOptions(select=""))
    assert set(names(plan)) == {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias", "optimizer.step"}
    assert plan.left_out == (("optimizer.lr", "a plain value"), ("epoch", "a plain value"))
    assert names(plan_export(saved({"model_b": torch.zeros(2)}).manifest)) == ["model_b"]
    assert names(plan_export(saved([torch.zeros(2)]).manifest)) == ["0"]


def test_a_subtree_and_a_single_tensor(snapshot):
    assert names(plan_export(snapshot.manifest, ExportOptions(select="model.0"))) == ["weight", "bias"]
    assert names(plan_export(snapshot.manifest, ExportOptions(select="model.0."))) == ["weight", "bias"]
    assert names(plan_export(snapshot.manifest, ExportOptions(select="model.0.weight"))) == ["weight"]


def test_a_prefix_is_not_a_subtree(snapshot):
    with pytest.raises(NotFoundError, match=r"it has no such name; there are tensors below 'model', 'optimizer'"):
        plan_export(snapshot.manifest, ExportOptions(select="mod"))


def test_nothing_to_export(snapshot, saved):
    with pytest.raises(NotFoundError, match="holds no tensors, only 1 other values"):
        plan_export(snapshot.manifest, ExportOptions(select="epoch"))
    with pytest.raises(NotFoundError, match="it has no tensors"):
        plan_export(saved({"a": 1}).manifest)


def test_options_that_cannot_be():
    with pytest.raises(ConfigError, match="must be positive"):
        ExportOptions(max_shard_bytes=0)
    with pytest.raises(ConfigError, match="only"):
        ExportOptions(dtype=torch.int8)


def test_ties_are_written_once(saved):
    p, q = torch.nn.Parameter(torch.ones(4, 2)), torch.ones(3)
    plan = plan_export(saved({"model": {"embed": p, "x": q, "head": p, "other": p}}).manifest)
    assert names(plan) == ["embed", "x"]
    assert plan.ties == {"head": "embed", "other": "embed"}
    header = header_of(plan.files[0])
    assert header.metadata["format"] == "pt"
    assert decode_ties(header.metadata, header.tensors, "x") == plan.ties


def test_a_tie_to_what_is_not_selected_is_written(saved):
    p = torch.ones(4, 2)
    plan = plan_export(saved({"ema": {"w": p}, "model": {"w": p, "v": p}}).manifest)
    assert names(plan) == ["w"]
    assert plan.ties == {"v": "w"}


def test_files_are_filled_in_order_and_never_beyond_the_limit(saved):
    tensors = {f"t{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate([40, 60, 1, 250, 0, 100, 99])}
    tied = {**tensors, "again": tensors["t5"]}
    plan = plan_export(saved({"model": tied}).manifest, ExportOptions(max_shard_bytes=100))
    assert [[t.name for t in file.tensors] for file in plan.files] == [
        ["t0", "t1"],
        ["t2"],
        ["t3"],
        ["t4", "t5"],
        ["t6"],
    ]
    assert [file.name for file in plan.files] == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    index = json.loads(plan.index)
    assert index["weight_map"] == {t.name: file.name for file in plan.files for t in file.tensors}
    assert index["metadata"]["total_size"] == plan.num_bytes == 550
    assert index["metadata"]["again"] == "t5"
    assert [len(header_of(file).metadata) for file in plan.files] == [1, 1, 1, 3, 1]


def test_wide_items_come_first_so_that_all_are_aligned(saved):
    state = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(3), "c": torch.zeros(3, dtype=torch.float64)}
    plan = plan_export(saved({"model": state}).manifest)
    assert names(plan) == ["c", "b", "a"]
    assert all(tensor.entry.start % tensor.dtype.itemsize == 0 for tensor in plan.tensors)
    assert len(plan.files[0].header) % 8 == 0


def test_a_cast_takes_floats_of_16_bits_and_more_only(saved):
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
    state = {str(dtype).removeprefix("torch."): torch.zeros(4, dtype=dtype) for dtype in dtypes}
    plan = plan_export(saved({"model": state}).manifest, ExportOptions(dtype=torch.bfloat16))
    written = {tensor.name: tensor.entry.dtype for tensor in plan.tensors}
    assert written == {
        "float64": "BF16",
        "float32": "BF16",
        "float16": "BF16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "int64": "I64",
        "bool": "BOOL",
    }
    assert {tensor.name for tensor in plan.casts} == {"float64", "float32", "float16"}
    assert plan.num_bytes == 4 * (4 * 2 + 1 + 8 + 1)


def test_bytes_and_values_are_named_as_left_out(saved):
    state = {"w": torch.zeros(2), "extra": io.BytesIO(b"abc"), "n": 3, "deep": {"s": "x"}}
    plan = plan_export(saved({"model": state}).manifest)
    assert set(plan.left_out) == {("extra", "bytes, not a tensor"), ("n", "a plain value"), ("deep.s", "a plain value")}


def test_everything_that_cannot_be_written_is_said_at_once(saved):
    zero = torch.zeros(2)
    state = {
        "a.b": zero.clone(),
        "a": {"b": zero.clone()},
        "c": torch.zeros(2, dtype=torch.complex128),
        "__metadata__": zero.clone(),
        "f": torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(()),
    }
    with pytest.raises(InvalidInputError, match="select another subtree") as caught:
        plan_export(saved({"model": state}).manifest)
    problems = caught.value.context["problems"]
    assert len(problems) == 4
    for part in ("('model', 'a.b') and ('model', 'a', 'b') would both be named 'a.b'", "complex128", "keeps", "0-d"):
        assert any(part in problem for problem in problems), part


def test_values_per_rank_have_the_rank_in_their_names(saved):
    plan = plan_export(saved({"rng": vc.PerRank(torch.arange(4))}).manifest)
    assert names(plan) == ["rng.0"]


def test_too_many_files_are_refused(saved, monkeypatch):
    monkeypatch.setattr("vescale_ckpt.interop.safetensors.plan._MAX_FILES", 2)
    state = {"model": {str(i): torch.zeros(4) for i in range(3)}}
    with pytest.raises(ConfigError, match="cannot export 3 files"):
        plan_export(saved(state).manifest, ExportOptions(max_shard_bytes=1))
