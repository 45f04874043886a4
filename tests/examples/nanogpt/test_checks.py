import subprocess
from pathlib import Path

import pytest
import torch
from checks import (
    check_export,
    check_killed,
    check_losses,
    check_state,
    check_steps,
    check_verify,
    run_cli,
    stored_digests,
)
from corpus import VOCAB_SIZE, Corpus, standard_library_text
from interrupt import Wreck
from model import GPT, GPTConfig
from runs import SIZE, Plan, Run
from train import digest_of, probe

import vescale_ckpt as vc
from vescale_tools import cli


def run(losses, *, digests=None, tp=1, wreck=None):
    events = [{"event": "loss", "step": step, "loss": loss} for step, loss in losses.items()]
    events += [{"event": "state", "step": step, "digests": found} for step, found in (digests or {}).items()]
    return Run(plan=Plan(name="x", seed=0, tp=tp), events=events, logits=Path("none"), wreck=wreck)


@pytest.fixture
def store(request):
    return vc.open_store(f"memory://{request.node.name}")


@pytest.fixture
def _command_in_process(monkeypatch, capsys):
    """Run the command without a process of its own, which would import torch anew."""

    def run_in_process(*arguments):
        code = cli.main(arguments)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, printed.out, printed.err)

    monkeypatch.setattr("checks.run_cli", run_in_process)


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


@pytest.mark.usefixtures("_command_in_process")
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_exported_weights_must_be_those_in_the_store(tmp_path, noise):
    torch.manual_seed(0)
    model = GPT(GPTConfig.of_size(SIZE, VOCAB_SIZE))
    store = vc.open_store(tmp_path / "store")
    vc.Checkpointer(store, "gpt").save(60, {"model": model})
    logits = probe(model, Corpus(standard_library_text()))
    torch.save(logits + noise, tmp_path / "logits.pt")
    trained = Run(plan=Plan(name="x", seed=0), events=run({60: 2.0}).events, logits=tmp_path / "logits.pt")
    same_as_store, same_as_ranks = check_export(store, trained, tmp_path / "export")
    assert same_as_store.passed
    assert same_as_ranks.passed == (noise == 0)


@pytest.mark.usefixtures("_command_in_process")
def test_a_damaged_store_is_told(tmp_path):
    store = vc.open_store(tmp_path / "store")
    vc.Checkpointer(store, "gpt").save(60, {"model": {"w": torch.ones(1000)}})
    assert check_verify(store.url).passed
    pack = next(path for path in (tmp_path / "store" / "packs").rglob("*") if path.is_file())
    pack.unlink()
    check = check_verify(store.url)
    assert not check.passed
    assert "exit code 3" in check.found


def test_the_command_runs_in_a_process_of_its_own():
    done = run_cli("--version")
    assert done.returncode == 0
    assert done.stdout
