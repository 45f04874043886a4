import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import vescale_ckpt as vc
from vescale_ckpt.errors import ConfigError, MismatchError, SnapshotNotFoundError
from vescale_train.data import Data, Order
from vescale_train.engine import Checkpoint, optimizer, parallelize, progress_of, step
from vescale_train.timeline import close_ndtimers, flush, init_ndtimers


@pytest.fixture
def fresh(mesh, loss_fn):
    """Make a training with dropout from torch's own generator, and what takes its steps."""

    def make(seed):
        torch.manual_seed(seed)
        model = parallelize(nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)), mesh)
        optim = optimizer(model, AdamW, lr=0.1)
        rows = torch.randn(23, 4, generator=torch.Generator().manual_seed(7))
        batches = Data([(row[:3], row[3:]) for row in rows], Order(num_samples=23, global_batch=4, seed=seed))

        def run(num_steps):
            return [
                step(model, optim, batch, loss_fn=loss_fn, micro_batches=2).item()
                for batch, _ in zip(batches, range(num_steps), strict=False)
            ]

        return model, optim, batches, run

    return make


def test_a_resumed_training_makes_the_losses_of_the_undisturbed_one(tmp_path, fresh):
    """Shuffling, dropout, moments and epochs go on, whatever seed the new process starts from (C118, C134)."""
    model, optim, batches, run = fresh(0)
    run(7)
    with Checkpoint(tmp_path, data=batches) as checkpoint:
        checkpoint.save(model, optim)
    want = run(9)
    model, optim, batches, run = fresh(99)
    with Checkpoint(tmp_path, data=batches) as checkpoint:
        assert checkpoint.resume(model, optim) == 7
    assert progress_of(model).step == 7
    assert run(9) == want


def test_a_save_is_made_every_so_many_steps(tmp_path, fresh):
    model, optim, batches, run = fresh(0)
    with Checkpoint(tmp_path, "mine", every=3, data=batches) as checkpoint:
        made = []
        for _ in range(7):
            run(1)
            made.append(checkpoint.maybe_save(model, optim) is not None)
        checkpoint.wait()
        assert made == [False, False, True, False, False, True, False]
        assert [snapshot.step for snapshot in checkpoint.store.snapshots("mine")] == [3, 6]
        assert dict(checkpoint.store["mine@6"].metadata) == {"mesh": {"dp": 1}}


def test_nothing_to_resume_changes_nothing(tmp_path, fresh):
    model, optim, _, _ = fresh(0)
    before = copy.deepcopy(model.state_dict())
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.resume(model, optim) == 0
        checkpoint.save(model, optim)
        with pytest.raises(SnapshotNotFoundError, match="train@5"):
            checkpoint.resume(model, optim, step=5)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_another_model_is_refused_and_left_as_it_is(tmp_path, fresh, mesh):
    model, optim, _, _ = fresh(0)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.save(model, optim)
        other = parallelize(nn.Linear(3, 2), mesh)
        weight = other.weight.detach().clone()
        with pytest.raises(MismatchError):
            checkpoint.resume(other, optimizer(other, AdamW))
    assert torch.equal(other.weight, weight)


def test_another_mesh_keeps_its_own_random_state(tmp_path, fresh, monkeypatch, caplog):
    model, optim, _, _ = fresh(0)
    caplog.set_level("INFO")
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.save(model, optim)
        torch.manual_seed(5)
        monkeypatch.setattr("vescale_train.engine.checkpoint._mesh_sizes", lambda _: {"dp": 2})
        before = torch.get_rng_state()
        checkpoint.resume(model, optim)
    assert torch.equal(torch.get_rng_state(), before)
    assert "was saved on the mesh {'dp': 1}" in caplog.text


def test_an_open_store_stays_open(tmp_path, fresh):
    model, optim, _, _ = fresh(0)
    with vc.open_store(tmp_path) as store:
        with Checkpoint(store) as checkpoint:
            checkpoint.save(model, optim)
        assert store.runs() == ["train"]


def test_names_and_numbers_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="every 0 steps"):
        Checkpoint(tmp_path, every=0)
    with pytest.raises(ConfigError, match="another name"):
        Checkpoint(tmp_path, model=1)


def test_saves_and_loads_show_in_the_timeline(tmp_path, fresh):
    model, optim, _, _ = fresh(0)
    init_ndtimers()
    try:
        with Checkpoint(tmp_path, every=1) as checkpoint:
            checkpoint.maybe_save(model, optim).result()
            checkpoint.resume(model, optim)
        names = {span.name for span in flush()}
    finally:
        close_ndtimers()
    assert {"checkpoint save write", "checkpoint save commit", "checkpoint load read"} <= names
