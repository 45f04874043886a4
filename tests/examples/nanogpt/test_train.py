import json

import pytest
import torch
import train
from train import NEWEST, parse_arguments, resume, set_up, train_step

SETTINGS = ["--size=tiny", "--batch-size=4", "--steps=6", "--save-every=2"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is so small that threads wait for one another most of the time
    yield
    torch.set_num_threads(num_threads)


def start(tmp_path, *more):
    return set_up(parse_arguments([f"--store={tmp_path / 'store'}", *SETTINGS, *more]))


def losses(training):
    return [train_step(training) for _ in range(3)]


def test_training_learns_and_counts(tmp_path):
    training = start(tmp_path)
    first, *_, last = (train_step(training) for _ in range(12))
    assert last < first - 0.1
    assert training.progress["step"] == 12
    assert training.progress["next_sample"] == 48


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(tmp_path):
    assert losses(start(tmp_path)) == losses(start(tmp_path))
    assert losses(start(tmp_path)) != losses(start(tmp_path, "--seed=1"))


def test_the_learning_rate_warms_up(tmp_path):
    training = start(tmp_path, "--learning-rate=0.5")
    rates = []
    for step in (0, 4, 9, 100):
        train.set_learning_rate(training.optimizer, 0.5, step)
        rates.append(training.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.05, 0.25, 0.5, 0.5])


def test_a_resumed_run_continues_as_if_nothing_had_happened(tmp_path):
    uninterrupted = start(tmp_path)
    losses(uninterrupted)
    uninterrupted.checkpointer.save(3, uninterrupted.state)
    expected = losses(uninterrupted)
    for which in (NEWEST, "3"):
        resumed = start(tmp_path, "--seed=1", f"--resume={which}")
        resume(resumed)
        assert resumed.progress == uninterrupted.progress | {"step": 3, "next_sample": 12}
        assert losses(resumed) == expected


def test_another_text_is_noticed(tmp_path):
    training = start(tmp_path)
    train_step(training)
    training.progress["corpus"] = "of another Python"
    training.checkpointer.save(1, training.state)
    with pytest.raises(SystemExit, match="is not the text"):
        resume(start(tmp_path, "--resume=newest"))


def test_the_script_saves_on_its_way_and_keeps_a_diary(tmp_path, monkeypatch):
    arguments = [f"--store={tmp_path / 'store'}", f"--diary={tmp_path / 'diary'}", f"--logits={tmp_path / 'logits'}"]
    monkeypatch.setattr("sys.argv", ["train.py", *arguments, *SETTINGS])
    train.main()
    events = [json.loads(line) for line in (tmp_path / "diary").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "loss"] == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in events if event["event"] == "state"] == [2, 4, 6]
    assert torch.load(tmp_path / "logits", weights_only=True).shape == (4, 32, 96)
    assert [info.step for info in start(tmp_path).checkpointer.store.snapshots("gpt")] == [2, 4, 6]
