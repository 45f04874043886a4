import json

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

import vescale_ckpt as vc
from vescale_ckpt.errors import FormatError, InvalidInputError, MismatchError, StateError
from vescale_train.integrations.lightning import StoreDDPStrategy, StoreSingleDeviceStrategy

# What Lightning and the libraries below it warn of is about them, or about the few workers of so small a loader.
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        self.losses = []

    def training_step(self, batch):
        loss = (self.layers(batch[:, :3]) - batch[:, 3:]).pow(2).mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.fixture
def loader():
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(7))
    return DataLoader(rows, batch_size=4)


def fit(tmp_path, loader, *, max_steps, ckpt_path=None, seed=0, callbacks=(), model=None, strategy=None, store="store"):
    torch.manual_seed(seed)
    model = model or Model()
    ours = StoreSingleDeviceStrategy(device=torch.device("cpu"), store=tmp_path / store, run="small")
    trainer = Trainer(
        max_steps=max_steps,
        strategy=strategy or ours,
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer, model


def test_a_training_goes_on_as_from_lightning_s_own_checkpoint_to_the_bit(tmp_path, loader):
    """Which batch it goes on with is Lightning's affair; weights, moments, schedule and counters are ours."""
    found = {}
    for name in ("ours", "lightning"):
        for max_steps in (6, 10):
            keeper = ModelCheckpoint(tmp_path / name, save_on_train_epoch_end=True)
            strategy = None if name == "ours" else SingleDeviceStrategy(device=torch.device("cpu"))
            path = found[name][1].best_model_path if max_steps == 10 else None
            settings = {"max_steps": max_steps, "ckpt_path": path, "seed": max_steps, "callbacks": [keeper]}
            trainer, model = fit(tmp_path, loader, strategy=strategy, **settings)
            found[name] = model, keeper, trainer.global_step
    (ours, _, our_step), (theirs, _, their_step) = found["ours"], found["lightning"]
    assert ours.losses == theirs.losses
    assert len(ours.losses) == 4
    assert our_step == their_step == 10
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    state = [model.trainer.optimizers[0].state_dict() for model in (ours, theirs)]
    assert state[0]["param_groups"] == state[1]["param_groups"]
    assert torch.equal(state[0]["state"][0]["exp_avg_sq"], state[1]["state"][0]["exp_avg_sq"])


def test_what_lies_at_the_path_names_the_snapshot_which_others_can_read(tmp_path, loader):
    trainer, model = fit(tmp_path, loader, max_steps=2)
    trainer.save_checkpoint(tmp_path / "folder" / "two.ckpt")
    found = json.loads((tmp_path / "folder" / "two.ckpt").read_text())
    assert found["snapshot"] == "small@2"
    with vc.open_store(tmp_path / "store") as store:
        assert torch.equal(store["small@2"].read("model.layers.0.weight"), model.layers[0].weight)


def test_callbacks_keep_the_last_and_delete_what_they_do_not_keep(tmp_path, loader):
    keeper = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=1, monitor="step", mode="max")
    fit(tmp_path, loader, max_steps=6, callbacks=[keeper])
    assert keeper.best_model_path.endswith("step=6.ckpt")
    with vc.open_store(tmp_path / "store") as store:
        assert [snapshot.step for snapshot in store.snapshots("small")] == [6]
    trainer, model = fit(tmp_path, loader, max_steps=8, ckpt_path=keeper.best_model_path, callbacks=[keeper])
    assert len(model.losses) == 2
    assert trainer.global_step == 8


def test_weights_alone_load_without_an_optimizer(tmp_path, loader):
    trainer, model = fit(tmp_path, loader, max_steps=2)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert not [name for name in trainer.strategy.store["small@2"].tensors() if "optimizer" in name]
    other = Model()
    trainer.strategy.load_checkpoint(tmp_path / "weights.ckpt")
    trainer.strategy.model = trainer.strategy._lightning_module = other
    trainer.strategy.load_model_state_dict({})
    assert torch.equal(other.layers[2].bias, model.layers[2].bias)


def test_another_model_is_refused_unless_it_is_to_be_loaded_in_part(tmp_path, loader):
    trainer, _ = fit(tmp_path, loader, max_steps=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")

    class Larger(Model):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.raises(MismatchError, match=r"model\.more"):
        fit(tmp_path, loader, max_steps=4, ckpt_path=tmp_path / "two.ckpt", model=Larger())
    trainer.strategy.load_checkpoint(tmp_path / "two.ckpt")
    larger = Larger()
    trainer.strategy._lightning_module = larger
    trainer.strategy.load_model_state_dict({}, strict=False)
    assert torch.equal(larger.layers[0].weight, trainer.strategy.store["small@2"].read("model.layers.0.weight"))


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "vescale-snapshot"}'])
def test_a_path_with_something_else_is_refused(tmp_path, loader, content):
    (tmp_path / "other.ckpt").write_text(content)
    with pytest.raises(FormatError, match="names no snapshot"):
        fit(tmp_path, loader, max_steps=2, ckpt_path=tmp_path / "other.ckpt")


def test_another_store_and_options_of_storage_are_refused(tmp_path, loader):
    trainer, _ = fit(tmp_path, loader, max_steps=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(InvalidInputError, match="names small@2 of the store"):
        fit(tmp_path, loader, max_steps=4, ckpt_path=tmp_path / "two.ckpt", store="elsewhere")
    with pytest.raises(InvalidInputError, match="open_store"):
        trainer.strategy.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={"a": 1})


def test_nothing_is_filled_from_nothing(tmp_path):
    strategy = StoreDDPStrategy(store=tmp_path / "store")
    with pytest.raises(StateError, match="load_checkpoint first"):
        strategy.load_model_state_dict({}, strict=False)
