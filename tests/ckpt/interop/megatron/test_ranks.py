"""Classic Megatron files: a whole model is cut as Megatron cuts it, written a file a rank, and merged again."""

from __future__ import annotations

import argparse

import pytest
import torch

from tests.ckpt.interop.foreign import bad
from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.interop.convert import convert
from vescale_ckpt.interop.foreign.detect import open_foreign

HIDDEN, FFN, VOCAB, LAYERS = 8, 12, 16, 4


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {"embedding.word_embeddings.weight": torch.randn(VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"decoder.layers.{i}."
        state |= {
            f"{layer}self_attention.linear_qkv.layer_norm_weight": torch.randn(HIDDEN),
            f"{layer}self_attention.linear_qkv.weight": torch.randn(3 * HIDDEN, HIDDEN),
            f"{layer}self_attention.linear_proj.weight": torch.randn(HIDDEN, HIDDEN),
            f"{layer}mlp.linear_fc1.weight": torch.randn(2 * FFN, HIDDEN),
            f"{layer}mlp.linear_fc2.weight": torch.randn(HIDDEN, FFN).to(torch.bfloat16),
            f"{layer}mlp.linear_fc2.bias": torch.randn(HIDDEN),
        }
    return state | {
        "decoder.final_layernorm.weight": torch.randn(HIDDEN),
        "output_layer.weight": torch.randn(VOCAB, HIDDEN),
    }


def cut(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    if "linear_fc1" in name:
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(size, 1)[rank].contiguous()
    if "embeddings" in name or "linear_qkv.weight" in name or "output_layer" in name:
        return tensor.chunk(size)[rank].clone()
    return tensor


def write(folder, tp: int, pp: int, change=None) -> dict[str, torch.Tensor]:
    state = whole()
    per_stage = LAYERS // pp
    for stage in range(pp):
        for rank in range(tp):
            model = {}
            for name, tensor in state.items():
                local = name
                if ".layers." in name:
                    number = int(name.split(".")[2])
                    if number // per_stage != stage:
                        continue
                    local = name.replace(f".{number}.", f".{number % per_stage}.", 1)
                elif (stage if name.startswith("embedding") else pp - 1 - stage) != 0:
                    continue
                model[local] = cut(name, tensor, rank, tp)
            path = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            path.mkdir(parents=True)
            args = argparse.Namespace(swiglu=True, num_layers=LAYERS)
            torch.save(
                {
                    "args": args,
                    "iteration": 5,
                    "checkpoint_version": 3.0,
                    "model": change(rank, stage, model) if change else model,
                    "rng_state": [],
                },
                path / "model_optim_rng.pt",
            )
    return state


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (2, 4)])
def test_any_cut_is_merged_to_the_bit(tmp_path, tp, pp):
    state = write(tmp_path / "it", tp, pp)
    snapshot = open_foreign(tmp_path / "it")
    assert snapshot.format == "megatron_ranks"
    found = snapshot.state_dict()
    assert set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert snapshot.values["iteration"] == 5
    assert snapshot.notes == ("left out, for each rank has its own: rng_state",)


def test_any_box_is_read_across_ranks(tmp_path):
    state = write(tmp_path / "it", 2, 2)
    snapshot = open_foreign(tmp_path / "it")
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    assert torch.equal(snapshot.read(name, (slice(4, 20), slice(1, 3))), state[name][4:20, 1:3])


def test_it_converts(tmp_path):
    state = write(tmp_path / "it", 2, 2)
    convert(tmp_path / "it", tmp_path / "out")
    found = open_foreign(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_copies_that_differ_are_an_error_and_none_is_picked(tmp_path):
    def change(rank, _, model):
        return {name: t + rank if "final_layernorm" in name else t for name, t in model.items()}

    write(tmp_path / "it", 2, 1, change)
    with pytest.raises(CorruptionError, match="different values"):
        open_foreign(tmp_path / "it").read("decoder.final_layernorm.weight")


def test_what_nothing_speaks_of_is_refused_until_the_caller_says(tmp_path):
    def change(rank, _, model):
        return {**model, "adapter.up": torch.full((2, 3), float(rank))}

    write(tmp_path / "it", 2, 1, change)
    with pytest.raises(FormatError, match=r"adapter\.up.*partition="):
        open_foreign(tmp_path / "it")
    with open_foreign(tmp_path / "it", partition={r"adapter\..*": "columns"}) as snapshot:
        assert snapshot.read("adapter.up").tolist() == [[0, 0, 0, 1, 1, 1]] * 2


def test_missing_ranks_are_named(tmp_path):
    write(tmp_path / "it", 2, 2)
    (tmp_path / "it" / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(FormatError, match=r"\(1, 0\)"):
        open_foreign(tmp_path / "it")


def test_code_is_refused(tmp_path):
    write(tmp_path / "it", 1, 1)
    bad.archive(tmp_path / "it" / "mp_rank_00" / "model_optim_rng.pt", {"x/data.pkl": b"cos\nsystem\n."})
    with pytest.raises(FormatError, match=r"os\.system"):
        open_foreign(tmp_path / "it")
