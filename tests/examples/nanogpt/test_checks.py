from pathlib import Path

import pytest
import torch
from checks import check_killed, check_losses, check_state, check_steps, load_exported, stored_digests
from interrupt import Wreck
from runs import Plan, Run
from safetensors.torch import save_file
from train import digest_of

import vescale_ckpt as vc


def run(losses, *, digests=None, tp=1, wreck=None):
    events = [{"event": "loss", "step": step, "loss": loss} for step, loss in losses.items()]
    events += [{"event": "state", "step": step, "digests": found} for step, found in (digests or {}).items()]
    return Run(plan=Plan(name="x", seed=0, tp=tp), events=events, logits=Path("none"), wreck=wreck)


@pytest.fixture
def store(request):
    return vc.open_store(f"memory://{request.node.name}")


def test_digests_see_every_bit_and_the_shape():
    tensor = torch.zeros(4)
    assert digest_of(tensor) == digest_of(torch.zeros(4))
    assert digest_of(tensor) != digest_of(torch.zeros(2, 2))
    assert digest_of(tensor) != digest_of(torch.tensor([0.0, 0.0, 0.0, -0.0]))
    assert digest_of(tensor) != digest_of(torch.zeros(4, dtype=torch.int32))


def test_a_state_must_have_the_same_tensors_with_the_same_bits():
    stored = {"model.a": "1", "model.b": "2"}
    assert check_state(run({1: 4.0}, digests={1: stored}), stored, 1, "").passed
    for wrong in ({"model.a": "1"}, stored | {"model.b": "3"}, stored | {"model.c": "4"}):
        check = check_state(run({1: 4.0}, digests={1: wrong}), stored, 1, "")
        assert not check.passed
        assert "1 of" in check.found
    assert not check_state(run({1: 4.0}, digests={1: {}}), {}, 1, "").passed


def test_losses_must_be_equal_on_the_same_layout_and_close_on_another():
    reference = run({1: 4.0, 2: 3.0})
    assert check_losses(run({1: 4.0, 2: 3.0}), reference).passed
    assert not check_losses(run({1: 4.0, 2: 3.0 + 1e-7}), reference).passed
    assert check_losses(run({2: 3.0 + 1e-7}, tp=2), reference).passed
    assert not check_losses(run({2: 3.0 + 1e-4}, tp=2), reference).passed
    assert not check_losses(run({2: 3.0, 3: 2.0}, tp=2), reference).passed


def test_stored_digests_are_those_of_model_and_optimizer(store):
    weights = {"w": torch.arange(6.0).reshape(2, 3)}
    vc.Checkpointer(store, "gpt").save(10, {"model": weights, "rng": vc.PerRank(torch.get_rng_state())})
    assert stored_digests(store["gpt@10"]) == {"model.w": digest_of(weights["w"])}


def test_a_killed_save_must_be_absent_and_the_others_present(store):
    checkpointer = vc.Checkpointer(store, "gpt")
    for step in (10, 20):
        checkpointer.save(step, {"x": step})
    killed = run({21: 4.0}, wreck=Wreck(newest_step=20, num_objects=3))
    assert check_killed(killed, store).passed
    assert not check_steps(store).passed
    for step in (30, 40, 50, 60):
        checkpointer.save(step, {"x": step})
    assert not check_killed(killed, store).passed
    assert check_steps(store).passed


def test_exported_weights_have_the_names_of_the_model(tmp_path):
    save_file({"model.a": torch.ones(2), "optimizer.state.a.step": torch.ones(1)}, tmp_path / "1.safetensors")
    save_file({"model.b": torch.zeros(2)}, tmp_path / "2.safetensors")
    assert sorted(load_exported(tmp_path)) == ["a", "b"]
