"""``rm``: removes snapshots from their run; their data stay until they are collected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_ckpt.errors import ConflictError, SnapshotNotFoundError
from vescale_storage import loop, refs
from vescale_tools.common import ExitCode, UsageError, add_url_argument, open_existing
from vescale_tools.output import Output, count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vescale_ckpt.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument("snapshots", metavar="RUN@STEP", nargs="+", help="with the step: never a tag, never the newest")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would go, and do nothing")


def run(args: argparse.Namespace) -> int:
    """Remove and return the exit code."""
    output = Output.of(args)
    wanted = list(dict.fromkeys(_parse(text) for text in args.snapshots))
    with open_existing(args) as store:
        _check(store, wanted)
        for run_name, step in wanted:
            if not args.dry_run:
                loop.run(refs.delete_ref(store.backend, run_name, step))
            output.line(f"{'would remove' if args.dry_run else 'removed'} {run_name}@{step}")
    output.line(f"{count(len(wanted), 'snapshot')}; data that nothing else refers to stay until they are collected")
    names = [f"{run_name}@{step}" for run_name, step in wanted]
    output.emit({"removed": [] if args.dry_run else names, "would_remove": names, "dry_run": args.dry_run})
    return ExitCode.OK


def _parse(text: str) -> tuple[str, int]:
    name = refs.parse_name(text)
    if name.step is None:
        raise UsageError(f"cannot remove {text!r}: write RUN@STEP, with the number of the step")
    return name.run, name.step


def _check(store: Store, wanted: Sequence[tuple[str, int]]) -> None:
    """Refuse all of it where a part cannot be removed."""
    for run_name in dict.fromkeys(run_name for run_name, _ in wanted):
        steps = {key.step for key in loop.run(refs.list_ref_keys(store.backend, run_name))}
        tags = loop.run(refs.list_tags(store.backend, run_name))
        for step in (step for name, step in wanted if name == run_name):
            if step not in steps:
                raise SnapshotNotFoundError(
                    f"cannot remove {run_name}@{step}: {store.url} has no such snapshot; nothing was removed",
                    run=run_name,
                    step=step,
                )
            named = [tag.name for tag in tags if tag.ref.step == step]
            if named:
                raise ConflictError(
                    f"cannot remove {run_name}@{step}: it is tagged {', '.join(named)}; delete the tags first; nothing "
                    "was removed",
                    run=run_name,
                    step=step,
                )
