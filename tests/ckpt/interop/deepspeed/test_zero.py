"""ZeRO checkpoints written by code that follows DeepSpeed's layout: masters and moments exact, by parameter."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch

from tests.ckpt.interop.foreign import bad
from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.interop.convert import convert
from vescale_ckpt.interop.foreign.detect import open_foreign

GROUPS = [{"embed.weight": (7, 3), "up.weight": (5, 4)}, {"up.bias": (5,), "norm.weight": (1,), "scale": ()}]
MOMENTS = ("exp_avg", "exp_avg_sq")


def masters() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for group in GROUPS for name, shape in group.items()}


def moments() -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return {moment: {name: torch.randn(t.shape) for name, t in masters().items()} for moment in MOMENTS}


def model_states(**more):
    module = OrderedDict((name, tensor.to(torch.bfloat16)) for name, tensor in masters().items())
    module |= {"frozen.weight": torch.arange(6.0).view(2, 3), "buffer": torch.arange(3)}
    return {
        "module": module,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in GROUPS],
        "buffer_names": ["buffer"],
        "shared_params": {"head.weight": "embed.weight"},
        "frozen_param_shapes": OrderedDict([("frozen.weight", torch.Size([2, 3]))]),
        "ds_version": "0.16.0",
        "global_steps": 12,
        **more,
    }


def flat_2(group, tensors, ranks):
    flat = torch.cat([tensors[name].reshape(-1) for name in group])
    return list(torch.cat([flat, torch.full((-flat.numel() % (2 * ranks),), 99.0)]).view(ranks, -1).clone())


def write_2(folder, ranks: int, stage: int, prefix: str = "") -> None:
    folder.mkdir()
    torch.save(model_states(), folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        state = {
            number: {
                "step": 12,
                **{m: flat_2(group, moments()[m], ranks)[rank] for m in MOMENTS},
            }
            for number, group in enumerate(GROUPS)
        }
        optimizer = {
            "zero_stage": stage,
            "partition_count": [ranks] * len(GROUPS),
            "single_partition_of_fp32_groups": [flat_2(group, masters(), ranks)[rank] for group in GROUPS],
            "base_optimizer_state": {"state": state, "param_groups": [{"lr": 0.1}]},
        }
        torch.save(
            {"optimizer_state_dict": optimizer}, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )


def part_3(tensor, rank, ranks):
    flat = tensor.reshape(-1)
    return torch.cat([flat, torch.full((-flat.numel() % ranks,), 99.0, dtype=flat.dtype)]).view(ranks, -1)[rank]


def write_3(folder, ranks: int) -> None:
    folder.mkdir()
    for rank in range(ranks):
        frozen = {"frozen.weight": part_3(torch.arange(6.0), rank, ranks).clone()}
        states = model_states(frozen_param_fragments=frozen)
        states["module"] = OrderedDict((name, torch.empty(0)) for name in states["module"])
        states["module"]["buffer"] = torch.arange(3)
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        halves = [list(group) for group in GROUPS]
        flats = [torch.cat([part_3(masters()[name], rank, ranks) for name in half]) for half in halves]
        state = {
            number: {m: torch.cat([part_3(moments()[m][name], rank, ranks) for name in half]) for m in MOMENTS}
            for number, half in enumerate(halves)
        }
        optimizer = {
            "zero_stage": 3,
            "partition_count": ranks,
            "fp32_flat_groups": flats,
            "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.1}]},
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def expected() -> dict[str, torch.Tensor]:
    found = {f"model.{name}": tensor for name, tensor in masters().items()}
    found |= {f"optimizer.{m}.{name}": t for m, tensors in moments().items() for name, t in tensors.items()}
    found |= {"model.frozen.weight": torch.arange(6.0).view(2, 3), "model.buffer": torch.arange(3)}
    return found | {"model.head.weight": masters()["embed.weight"]}


WRITERS = {
    "stage 1": lambda folder, ranks: write_2(folder, ranks, 1),
    "stage 2": lambda folder, ranks: write_2(folder, ranks, 2),
    "bf16": lambda folder, ranks: write_2(folder, ranks, 1, "bf16_"),
    "stage 3": write_3,
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", WRITERS)
def test_masters_and_moments_are_exact_whatever_wrote_them(tmp_path, kind, ranks):
    WRITERS[kind](tmp_path / "step", ranks)
    snapshot = open_foreign(tmp_path / "step")
    assert snapshot.format == "deepspeed_zero"
    found = snapshot.state_dict()
    wanted = expected()
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert snapshot.tensors()["model.head.weight"].alias_of == "model.embed.weight"
    assert snapshot.values["global_steps"] == 12
    assert torch.equal(snapshot.read("model.embed.weight", slice(2, 5)), wanted["model.embed.weight"][2:5])


def test_it_converts(tmp_path):
    write_3(tmp_path / "step", 3)
    convert(tmp_path / "step", tmp_path / "out")
    found = open_foreign(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected().items())


def test_a_missing_rank_is_told(tmp_path):
    write_2(tmp_path / "step", 3, 2)
    (tmp_path / "step" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(FormatError, match="3 ranks"):
        open_foreign(tmp_path / "step")
    (tmp_path / "step" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(FormatError, match=r"ranks \[1\]"):
        open_foreign(tmp_path / "step")


def test_frozen_parameters_that_were_written_empty_are_an_error(tmp_path):
    write_3(tmp_path / "step", 2)
    for rank in range(2):
        states = model_states()
        states["module"] = OrderedDict((name, torch.empty(0)) for name in states["module"])
        torch.save(states, tmp_path / "step" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    with pytest.raises(CorruptionError, match=r"frozen\.weight"):
        open_foreign(tmp_path / "step")


def test_partitions_that_are_too_short_are_an_error(tmp_path):
    write_2(tmp_path / "step", 2, 2)
    states = model_states()
    states["param_shapes"][0]["more"] = torch.Size([100])
    torch.save(states, tmp_path / "step" / "mp_rank_00_model_states.pt")
    with pytest.raises(CorruptionError, match="elements"):
        open_foreign(tmp_path / "step")


def test_model_parallel_files_and_code_are_refused(tmp_path):
    write_2(tmp_path / "step", 1, 2)
    path = tmp_path / "step" / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="universal"):
        open_foreign(tmp_path / "step")
    path.unlink()
    bad.archive(tmp_path / "step" / "mp_rank_00_model_states.pt", {"x/data.pkl": b"cos\nsystem\n."})
    with pytest.raises(FormatError, match=r"os\.system"):
        open_foreign(tmp_path / "step")


def test_all_of_the_padding_stays_out(tmp_path):
    write_2(tmp_path / "step", 5, 2)
    found = open_foreign(tmp_path / "step").state_dict()
    total = sum(t.numel() for name, t in found.items() if name.startswith("optimizer.exp_avg."))
    assert total == sum(math.prod(shape) for group in GROUPS for shape in group.values())
    assert not any((tensor == 99).any() for tensor in found.values())
