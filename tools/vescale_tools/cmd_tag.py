"""``tag``: names a snapshot; what is named is not removed, and a name never moves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vescale_ckpt.errors import ConflictError, RefNotFoundError
from vescale_storage import loop, refs
from vescale_tools.common import ExitCode, UsageError, add_url_argument, open_existing
from vescale_tools.output import Output

if TYPE_CHECKING:
    import argparse

    from vescale_ckpt.store import Store
    from vescale_storage.refs import SnapshotName, Tag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument(
        "snapshot", metavar="RUN@STEP", help="what to name; with --delete RUN@TAG, the name to take away"
    )
    parser.add_argument("tag", metavar="TAG", nargs="?", help="the name; not digits only")
    parser.add_argument("--delete", action="store_true", help="take the name away; the snapshot stays")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, say what would be done, and do nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Set or delete the tag and return the exit code."""
    output = Output.of(args)
    name = refs.parse_name(args.snapshot)
    if args.delete == (args.tag is not None):
        raise UsageError("cannot tag: write 'tag URL RUN@STEP TAG', or 'tag URL RUN@TAG --delete'")
    with open_existing(args) as store:
        if args.delete:
            _delete(store, name, output, dry_run=args.dry_run)
        else:
            _set(store, name, args.tag, output, dry_run=args.dry_run)
    return ExitCode.OK


def _set(store: Store, name: SnapshotName, tag: str, output: Output, *, dry_run: bool) -> None:
    step = store.resolve(name).step
    ref = store.resolve(refs.SnapshotName(name.run, step))  # a tag may be on an older version of its step
    there = _find(store, ref.run, tag)
    if there is not None and there.ref != ref:
        raise ConflictError(
            f"cannot set {ref.run}@{tag} to step {ref.step} version {ref.version}: it is on step {there.ref.step} "
            f"version {there.ref.version} and tags do not move; delete it first",
            run=ref.run,
            tag=tag,
        )
    if not dry_run:
        loop.run(refs.set_tag(store.backend, ref.run, tag, ref.step, now=time.time()))
    verb = "is already" if there is not None else "would be" if dry_run else "is now"
    output.line(f"{ref.run}@{tag} {verb} step {ref.step}")
    output.emit({"run": ref.run, "tag": tag, "step": ref.step, "version": ref.version, "dry_run": dry_run})


def _find(store: Store, run_name: str, tag: str) -> Tag | None:
    try:
        return loop.run(refs.read_tag(store.backend, run_name, tag))
    except RefNotFoundError:
        return None


def _delete(store: Store, name: SnapshotName, output: Output, *, dry_run: bool) -> None:
    if name.tag is None:
        raise UsageError(f"cannot delete a tag by {name.run!r}: write RUN@TAG")
    if dry_run:
        loop.run(refs.read_tag(store.backend, name.run, name.tag))
    else:
        loop.run(refs.delete_tag(store.backend, name.run, name.tag))
    output.line(f"{'would delete' if dry_run else 'deleted'} the tag {name.run}@{name.tag}")
    output.emit({"run": name.run, "tag": name.tag, "deleted": not dry_run, "dry_run": dry_run})
