import dataclasses
from pathlib import Path

import pytest
import torch
import train
from checks import check_losses, check_state, stored_digests
from diary import read_diary
from launch import Command, Job
from model import GPT, GPTConfig
from parallel import World, tensor_parallel_plan, whole_state
from runs import Plan, Run
from train import parse_arguments, resume, set_up, train_step


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_needs_no_process_group():
    world = World.join(1, 1)
    assert (world.rank, world.num_ranks, world.mesh) == (0, 1, None)
    assert (world.size("dp"), world.coordinate("tp")) == (1, 0)
    assert world.mean_over_dp(torch.tensor(2.5)) == 2.5
    assert world.total(3, 4) == [3, 4]
    world.leave()


def test_a_layout_for_another_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="dp 2 x tp 2 needs 4 processes, but the launcher started 3"):
        World.join(2, 2)


def test_every_matrix_is_cut():
    model = GPT(GPTConfig.of_size("tiny", 96))
    matrices = {
        name.removesuffix(".weight") for name, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1
    }
    assert tensor_parallel_plan(len(model.blocks)).keys() == matrices


def test_the_whole_state_has_each_tensor_under_its_name():
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert [name for name, _ in whole_state(model, optimizer)] == [
        "model.weight",
        "optimizer.state.weight.momentum_buffer",
    ]


@pytest.mark.distributed
def test_four_ranks_compute_what_one_rank_does_and_it_can_go_on_from_theirs(tmp_path):
    settings = [f"--store={tmp_path / 'store'}", "--size=tiny", "--batch-size=4"]
    ranks = ["--dp=2", "--tp=2", "--steps=4", "--save-every=2", f"--diary={tmp_path / 'diary'}"]
    command = Command(
        script=Path(train.__file__),
        arguments=(*settings, *ranks),
        num_ranks=4,
        log_folder=tmp_path / "logs",
        timeout_seconds=400,
    )
    with Job(command) as job:
        job.wait()
    four = Run(plan=Plan(name="four", seed=0, dp=2, tp=2), events=read_diary(tmp_path / "diary"), logits=tmp_path)

    alone = set_up(parse_arguments(settings))
    losses = {step: train_step(alone) for step in (1, 2, 3, 4)}
    one = dataclasses.replace(
        four,
        plan=Plan(name="one", seed=0),
        events=[{"event": "loss", "step": step, "loss": loss} for step, loss in losses.items()],
    )
    assert check_losses(four, one).passed

    assert check_state(four, stored_digests(alone.checkpointer.store["gpt@2"]), 2, "").passed
    resumed = set_up(parse_arguments([*settings, "--seed=1", "--resume=2"]))
    resume(resumed)
    assert [train_step(resumed) for _ in range(2)] == pytest.approx([losses[3], losses[4]], abs=1e-5)
