"""Train a Llama of Hugging Face, unchanged, on any mesh, and go on from its checkpoints on any other.

    python examples/llama/train.py --store ./ckpts
    torchrun --nproc-per-node 4 examples/llama/train.py --store ./ckpts --mesh dp=2,tp=2 --resume
    torchrun --nproc-per-node 2 examples/llama/train.py --store s3://bucket/ckpts --mesh tp=2 --exact

The model is a small random one, made from a configuration; nothing is downloaded but what the store holds.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from text_bytes import VOCAB_SIZE, TextBytes, read_text
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

import vescale_train as vt
from vescale_train.mesh import batch_group
from vescale_train.metrics import transformer_flops
from vescale_train.pipe import PipelineParallelPlan
from vescale_train.plan import from_json
from vescale_train.timeline import TraceFile, close_ndtimers, merge_traces, write_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

WARMUP_STEPS = 10
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "small": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
}
"""Name -> numbers of ``LlamaConfig``."""


def main() -> None:
    """Train to the last step, saving on the way."""
    args = parse_arguments()
    mesh = vt.init(**args.mesh, device=args.device)
    if args.trace is not None:
        vt.init_ndtimers([TraceFile(args.trace)])
    losses = train(args, mesh)
    if args.trace is not None:
        finish_trace(args.trace)
    if args.losses is not None and dist.get_rank() == 0:
        args.losses.write_text(json.dumps(losses), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def train(args: argparse.Namespace, mesh: DeviceMesh) -> dict[int, float]:
    """Make the steps that are missing, and return their losses by step."""
    torch.manual_seed(args.seed)  # the same weights on every rank, so that the parts that are cut out fit together
    model = LlamaForCausalLM(config_of(args))
    flops = transformer_flops(
        num_parameters=sum(parameter.numel() for parameter in model.model.layers.parameters()),
        num_layers=model.config.num_hidden_layers,
        width=model.config.hidden_size,
        context=args.context,
    )
    model = vt.parallelize(
        model.to(mesh.device_type), mesh, plan_of(args.plan), exact=args.exact, pipeline=pipeline_of(args, mesh)
    )
    optim = vt.optimizer(
        model, torch.optim.AdamW, lr=args.learning_rate, weight_decay=0.1, clip_grad=1.0, zero=args.zero
    )
    schedule = LambdaLR(optim, lambda step: rate(step, args.schedule_steps))
    dataset = TextBytes(read_text(args.text), args.context)
    batches = vt.data(dataset, mesh, global_batch=args.global_batch, seed=args.seed, steps=args.steps)
    meter = vt.Meter(
        flops_per_token=flops, peak_flops=args.peak_flops, num_ranks=dist.get_world_size(), num_steps=args.steps
    )
    losses = {}
    with ExitStack() as stack:
        every = args.save_every
        ckpt = stack.enter_context(vt.Checkpoint(args.store, args.name, every=every, data=batches, schedule=schedule))
        progress = stack.enter_context(vt.Progress(args.steps)) if dist.get_rank() == 0 else None
        done = ckpt.resume(model, optim) if args.resume else 0
        for step, batch in enumerate(batches, done + 1):
            loss = vt.step(model, optim, batch, micro_batches=args.micro_batches, scheduler=schedule)
            ckpt.maybe_save(model, optim)
            losses[step] = loss.item()
            reading = meter.update(step=step, loss=losses[step], tokens=args.global_batch * args.context)
            if progress is not None:
                progress.show(reading)
    return losses


def config_of(args: argparse.Namespace) -> LlamaConfig:
    """Return the configuration of a size class."""
    return LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=args.context, use_cache=False, **SIZES[args.size])


def plan_of(name: str) -> Any:
    """Return what ``vt.parallelize`` takes: "auto", or the plan in a JSON file."""
    return name if name == "auto" else from_json(Path(name).read_text(encoding="utf-8"))


def pipeline_of(args: argparse.Namespace, mesh: DeviceMesh) -> PipelineParallelPlan | None:
    """Return the plan of the stages, where the mesh has any: micro-batches are those of the whole step."""
    if args.mesh.get("pp", 1) == 1 or args.micro_batches is None:
        return None
    replicas = batch_group(mesh)
    return PipelineParallelPlan(num_microbatches=args.micro_batches // (1 if replicas is None else replicas.size()))


def rate(step: int, num_steps: int) -> float:
    """Return the part of the learning rate that a step has: warmed up linearly, then half a cosine."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))


def finish_trace(folder: Path) -> None:
    """Close this rank's trace; rank 0 makes one file of all, and a page to look at."""
    vt.flush(align=True)
    close_ndtimers()
    dist.barrier()
    if dist.get_rank() == 0:
        spans = merge_traces(folder.glob("rank-*.json"), folder / "trace.json")
        write_page(folder / "trace.html", spans, title="Training of a Llama")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings that the command line gives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", required=True, help="where the checkpoints are: a folder or a URL such as s3://...")
    # not --run: torchrun takes that for an option of its own, cut short
    parser.add_argument("--name", default="llama", help="the name of this training in the store")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--mesh", type=mesh_sizes, default={}, help="axes with sizes, such as dp=2,tp=2; -1: the rest")
    parser.add_argument("--plan", default="auto", help="'auto', or a JSON file with a plan")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="stage of ZeRO; by itself 1 where dp > 1")
    parser.add_argument("--exact", action="store_true", help="give one device's bits on every mesh")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="how large a model")
    parser.add_argument("--text", type=Path, help="what to learn; by itself the standard library's sources")
    parser.add_argument("--context", type=int, default=64, help="tokens a sample")
    parser.add_argument("--steps", type=int, default=60, help="train until this step")
    parser.add_argument("--schedule-steps", type=int, default=1000, help="steps until the rate is at its lowest")
    parser.add_argument("--global-batch", type=int, default=16, help="samples a step, over all ranks")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the highest")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the data")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by itself the GPU if there is one")
    parser.add_argument("--peak-flops", type=float, help="operations a second of one device, to tell the MFU")
    parser.add_argument("--losses", type=Path, help="write the losses by step to this file, as JSON")
    parser.add_argument("--trace", type=Path, help="write what every rank did, when, to this folder")
    return parser.parse_args(arguments)


def mesh_sizes(text: str) -> dict[str, int]:
    """Return the axes of a mesh: "dp=2,tp=2" is {"dp": 2, "tp": 2}.

    Raises:
        ValueError: it is written in another way.
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    return {name.strip(): int(size) for name, _, size in pairs}


if __name__ == "__main__":
    main()
