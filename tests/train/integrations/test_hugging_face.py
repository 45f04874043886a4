import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import vescale_ckpt as vc
from vescale_ckpt.errors import ConfigError, FormatError, SnapshotNotFoundError
from vescale_train.integrations.hugging_face import StoreCallback, resume_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and what they import


class Model(nn.Module):
    """Tied weights, dropout, and a loss of its own, as models of the library have."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids, labels):
        logits = self.head(self.dropout(self.norm(self.words(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


DATA = [{"input_ids": torch.arange(i, i + 5) % 11, "labels": torch.arange(i + 1, i + 6) % 11} for i in range(20)]


class Losses:
    """Keeps every loss to the bit."""

    def __init__(self, model):
        self.seen = []
        model.register_forward_hook(lambda _, __, output: self.seen.append(output["loss"].item()))


def train(tmp_path, *, max_steps, callbacks=(), resume=None, seed=0):
    torch.manual_seed(seed)
    model = Model()
    losses = Losses(model)
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=max_steps,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = Trainer(model=model, args=args, train_dataset=DATA, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return model, losses.seen, trainer


def test_a_resumed_training_is_the_undisturbed_one_to_the_bit(tmp_path):
    undisturbed, want, _ = train(tmp_path, max_steps=11)
    train(tmp_path, max_steps=7, callbacks=[StoreCallback(tmp_path / "store", "bert", every=4)])
    with vc.open_store(tmp_path / "store") as store:
        assert [snapshot.step for snapshot in store.snapshots("bert")] == [4, 7]
    for step, name in ((4, "a"), (None, "b")):
        folder = resume_folder(tmp_path / "store", "bert", tmp_path / name, step=step)
        model, losses, trainer = train(tmp_path, max_steps=11, resume=folder, seed=99)
        assert losses == want[step or 7 :]
        assert trainer.state.global_step == 11
        for key, value in undisturbed.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key


def test_a_save_costs_one_copy_of_what_is_tied(tmp_path):
    train(tmp_path, max_steps=2, callbacks=[StoreCallback(tmp_path / "store", "bert")])
    with vc.open_store(tmp_path / "store") as store:
        state = store["bert"].state_dict()
    assert state["model"]["head.weight"].data_ptr() == state["model"]["words.weight"].data_ptr()
    assert set(state["optimizer"]["state"]) == {"words.weight", "norm.weight", "norm.bias"}


def test_what_is_not_there_or_of_others_is_refused(tmp_path):
    with vc.open_store(tmp_path / "store") as store, vc.Checkpointer(store, "other") as checkpointer:
        checkpointer.save(1, {"model": nn.Linear(1, 1)})
        with pytest.raises(FormatError, match="it has no optimizer, random, schedule, trainer"):
            resume_folder(store, "other", tmp_path / "folder")
        with pytest.raises(SnapshotNotFoundError):
            resume_folder(store, "other", tmp_path / "folder", step=2)
    assert not (tmp_path / "folder").exists()
    with pytest.raises(ConfigError, match="every 0 steps"):
        StoreCallback(tmp_path / "store", "x", every=0)
