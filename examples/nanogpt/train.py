"""Train a small GPT and keep it in a checkpoint store: the script that each rank runs. It reads from top to bottom.

Alone, or under any launcher that sets torchrun's environment variables, on any layout with dp x tp = number of ranks:

    python examples/nanogpt/train.py --store ./ckpts
    torchrun --nproc-per-node 4 examples/nanogpt/train.py --store ./ckpts --dp 2 --tp 2
    torchrun --nproc-per-node 2 examples/nanogpt/train.py --store ./ckpts --dp 2 --resume newest

The second may continue what the first has saved, and the third what the second has: a checkpoint has no layout.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from corpus import VOCAB_SIZE, Corpus, share_of, standard_library_text
from diary import Diary
from model import GPT, SIZES, GPTConfig, token_loss
from parallel import World, parallelize, whole_state

import vescale_ckpt as vc

if TYPE_CHECKING:
    from collections.abc import Sequence

WARMUP_STEPS = 10
PROBE_SAMPLES = 4
NEWEST = "newest"


@dataclass(kw_only=True)
class Training:
    """All that a rank works with."""

    args: argparse.Namespace
    world: World
    corpus: Corpus
    model: GPT
    optimizer: torch.optim.Optimizer
    progress: dict[str, Any]
    """The step, and where in the data the next batch begins: plain values."""
    checkpointer: vc.Checkpointer
    diary: Diary

    @property
    def state(self) -> dict[str, Any]:
        """All that must survive. The model and the optimizer go in as they are, whatever their layout."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "extra": self.progress,
            "rng": vc.PerRank(torch.get_rng_state()),
        }


def main() -> None:
    """Train from random weights or from a checkpoint to the last step, saving on the way."""
    training = set_up(parse_arguments())
    if training.args.resume is not None:
        resume(training)
    train(training)
    say_goodbye(training)


def set_up(args: argparse.Namespace) -> Training:
    """Return a model with random weights, laid out over the ranks, and all that goes with it."""
    world = World.join(args.dp, args.tp)
    torch.manual_seed(args.seed)  # the same on every rank, so that the parts that they cut out fit together
    corpus = Corpus(standard_library_text())
    model = GPT(GPTConfig.of_size(args.size, VOCAB_SIZE))
    parallelize(model, world)
    return Training(
        args=args,
        world=world,
        corpus=corpus,
        model=model,
        optimizer=make_optimizer(model, args.learning_rate),
        progress={"step": 0, "data_seed": args.seed, "next_sample": 0, "corpus": corpus.digest},
        checkpointer=vc.Checkpointer(vc.open_store(args.store), run=args.run),
        diary=Diary(args.diary if world.rank == 0 else None),
    )


def resume(training: Training) -> None:
    """Take model, optimizer and progress from a checkpoint, whatever layout has saved it.

    Random states belong to single ranks and would only fit a job of the same size, so they are left out by name. That
    changes nothing here: after the first weights, this training draws no random numbers.
    """
    step = None if training.args.resume == NEWEST else training.args.resume
    report = training.checkpointer.load(training.state, step=step, ignore=("rng",))
    if training.progress["corpus"] != training.corpus.digest:
        raise SystemExit("this Python's standard library is not the text that the checkpoint was trained on")
    needed, read, exchanged = training.world.total(report.bytes_needed, report.bytes_read, report.bytes_exchanged)
    training.diary.write("resumed", step=report.step, needed=needed, read=read, exchanged=exchanged)
    note_state(training)


def train(training: Training) -> None:
    """Make the steps that are missing, and save every few of them in the background."""
    args, progress = training.args, training.progress
    save: vc.SaveHandle | None = None
    while progress["step"] < args.steps:
        loss = train_step(training)
        training.diary.write("loss", step=progress["step"], loss=loss)
        if args.save_every and progress["step"] % args.save_every == 0:
            note_state(training)
            if save is not None:
                save.result()  # raises what went wrong with the save before, on whichever rank it did
            # Returns as soon as the state is copied; hashing and writing go on behind the next steps.
            save = training.checkpointer.save(progress["step"], training.state, blocking=False)
    if save is not None:
        save.result()


def train_step(training: Training) -> float:
    """Learn from the next global batch, and return the loss over all of it."""
    args, world, progress = training.args, training.world, training.progress
    batch = range(progress["next_sample"], progress["next_sample"] + args.batch_size)
    mine = share_of(world.coordinate("dp"), world.size("dp"), batch)
    inputs, targets = training.corpus.batch(progress["data_seed"], mine, training.model.config.context)

    set_learning_rate(training.optimizer, args.learning_rate, progress["step"])
    loss = token_loss(training.model(inputs), targets)
    loss.backward()  # FSDP2 takes the mean of the gradients over dp, so any dp gives what one rank would have got
    training.optimizer.step()
    training.optimizer.zero_grad()

    progress["next_sample"] = batch.stop
    progress["step"] += 1
    return world.mean_over_dp(loss)


def make_optimizer(model: GPT, learning_rate: float) -> torch.optim.AdamW:
    """Return AdamW as nanoGPT sets it: matrices decay, norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, step: int) -> None:
    """Warm up linearly, then stay: a pure function of the step, so there is no scheduler to save."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / WARMUP_STEPS)


def say_goodbye(training: Training) -> None:
    """Leave the trained model's answers to some fixed samples, if asked for, and the other ranks."""
    logits = probe(training.model, training.corpus)
    if training.args.logits is not None and training.world.rank == 0:
        torch.save(logits, training.args.logits)
    training.world.leave()


def note_state(training: Training) -> None:
    """Write digests of the whole state into the diary, for whoever wants to compare; collective."""
    if training.args.diary is not None:
        digests = {name: digest_of(tensor) for name, tensor in whole_state(training.model, training.optimizer)}
        training.diary.write("state", step=training.progress["step"], digests=digests)


@torch.no_grad()
def probe(model: GPT, corpus: Corpus) -> torch.Tensor:
    """Return the logits for some fixed samples: what the model would say, to compare with another copy of it."""
    inputs, _ = corpus.batch(0, range(PROBE_SAMPLES), model.config.context)
    return model(inputs)


def digest_of(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's shape, dtype and bytes: equal if and only if all of its bits are."""
    content = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    content.update(tensor.contiguous().cpu().numpy().tobytes())
    return content.hexdigest()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings that the command line gives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", required=True, help="where the checkpoints are: a folder or a URL such as s3://...")
    parser.add_argument("--run", default="gpt", help="the name of this series of checkpoints in the store")
    parser.add_argument("--resume", type=_step_or_newest, help=f"start from this step's checkpoint, or '{NEWEST}'")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (FSDP2)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (DTensor)")
    parser.add_argument("--size", choices=SIZES, default="small", help="how large a model")
    parser.add_argument("--steps", type=int, default=60, help="train until this step")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints; 0: none")
    parser.add_argument("--batch-size", type=int, default=16, help="samples a step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="after the warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the data")
    parser.add_argument("--diary", type=Path, help="write what happens to this file, a JSON object a line")
    parser.add_argument("--logits", type=Path, help="write the last model's answers to fixed samples to this file")
    return parser.parse_args(arguments)


def _step_or_newest(text: str) -> int | str:
    return text if text == NEWEST else int(text)


if __name__ == "__main__":
    main()
