"""``prune``: deletes the snapshots of runs that a rule does not keep; their data stay until they are collected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_ckpt.retention import RetentionPolicy
from vescale_tools.common import (
    ExitCode,
    add_dry_run_argument,
    add_url_argument,
    open_existing,
    parse_count,
)
from vescale_tools.output import Output, count

if TYPE_CHECKING:
    import argparse

    from vescale_ckpt.pruning import Pruned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="whose snapshots; tagged ones and the newest always stay"
    )
    parser.add_argument(
        "--keep-last",
        type=parse_count,
        required=True,
        metavar="N",
        help="keep so many of the highest steps, and of those that were committed last",
    )
    parser.add_argument("--keep-every", type=parse_count, metavar="K", help="keep also every step that K divides")
    parser.add_argument(
        "--keep-step", type=int, action="append", default=[], metavar="STEP", help="keep this one too; may be repeated"
    )
    add_dry_run_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Prune and return the exit code."""
    output = Output.of(args)
    policy = RetentionPolicy(keep_last=args.keep_last, keep_every=args.keep_every)
    done: list[Pruned] = []
    with open_existing(args) as store:
        # All are planned before any is touched: a run that is not there is no reason to have pruned another.
        plans = [
            store.prune(name, policy, keep_steps=args.keep_step, dry_run=True) for name in dict.fromkeys(args.runs)
        ]
        for planned in plans:
            if args.dry_run:
                done.append(planned)
            else:
                with output.counting(f"prune {planned.plan.run}") as progress:
                    done.append(store.prune(planned.plan.run, policy, keep_steps=args.keep_step, progress=progress))
            _print(output, done[-1])
    output.emit({"dry_run": args.dry_run, "runs": [_as_json(pruned) for pruned in done]})
    return ExitCode.OK


def _print(output: Output, pruned: Pruned) -> None:
    plan = pruned.plan
    spared = set(pruned.spared)
    rows = [[str(kept.step), "stays", ", ".join(kept.reasons)] for kept in plan.kept]
    verb = "would go" if pruned.dry_run else "deleted"
    rows += [
        [str(step), "stays" if step in spared else verb, "tagged meanwhile" * (step in spared)] for step in plan.deleted
    ]
    output.table(("step", plan.run, "why"), sorted(rows, key=lambda row: int(row[0])), right=("step",))
    num_old = len(plan.superseded) if pruned.dry_run else pruned.num_superseded
    output.line(
        f"{plan.run}: {count(len(plan.kept) + len(spared), 'snapshot')} stay, "
        f"{len(plan.deleted) - len(spared)} {'would go' if pruned.dry_run else 'are deleted'}"
        + (f", and {count(num_old, 'older version')} of those that stay" if num_old else "")
        + "; their data go with gc"
    )


def _as_json(pruned: Pruned) -> dict[str, Any]:
    plan = pruned.plan
    return {
        "run": plan.run,
        "kept": [{"step": kept.step, "reasons": list(kept.reasons)} for kept in plan.kept],
        "would_delete": list(plan.deleted),
        "deleted": list(pruned.deleted),
        "spared": list(pruned.spared),
        "superseded": [{"step": step, "version": version} for step, version in plan.superseded],
        "superseded_deleted": pruned.num_superseded,
    }
