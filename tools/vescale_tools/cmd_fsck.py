"""``fsck``: holds all objects of a store against one another, and makes anew what can be made from the rest."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import NotFoundError
from vescale_ckpt.repairing.mend import Mended, mend_store, recover
from vescale_ckpt.repairing.survey import survey_store
from vescale_tools.common import (
    OPTIONS_VARIABLE,
    ExitCode,
    UsageError,
    add_dry_run_argument,
    add_url_argument,
    options_of,
    storage_options,
)
from vescale_tools.output import Output, count, format_time
from vescale_tools.surveys import finding_json, opened, print_survey, survey_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vescale_ckpt.repairing.findings import Orphan, Survey
    from vescale_storage.backend import Backend

_ROUNDS = 3
"""A manifest that is back names packs that nobody could look at before."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument("--deep", action="store_true", help="read every byte of every pack")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="make anew what can be: index objects, packs of which sound copies of all chunks are left, refs whose "
        "manifest is known, the root; without it nothing is written",
    )
    parser.add_argument("--mirror", metavar="URL", help="a copy of the store, to take from what is lost here")
    parser.add_argument(
        "--mirror-option", action="append", default=[], metavar="KEY=VALUE", help="as --storage-option, for the mirror"
    )
    parser.add_argument(
        "--recover",
        metavar="MANIFEST",
        help="bring back a snapshot that was deleted: commit the manifest whose name begins so; fsck lists them",
    )
    add_dry_run_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Look, mend if asked to, and return the exit code."""
    if args.recover and args.repair:
        raise UsageError("cannot recover and repair in one call: repair first")
    output = Output.of(args)
    with contextlib.ExitStack() as stack:
        backend = stack.enter_context(opened(args.url, options_of(args)))
        mirrors: list[Backend] = []
        if args.mirror:
            options = storage_options(args.mirror_option, os.environ.get(OPTIONS_VARIABLE))
            mirrors.append(stack.enter_context(opened(args.mirror, options)))
        survey = _survey(backend, mirrors, args, output)
        recovered = _recover(backend, survey, args, output) if args.recover else None
        mended, after = _mend(backend, mirrors, survey, args, output)
    if not args.recover:
        _print(output, args, survey, mended, after)
    output.emit(
        {
            "url": args.url,
            "dry_run": args.dry_run,
            **survey_json(survey),
            "repaired": [finding_json(finding) for finding in mended.done],
            "failed": [{**finding_json(finding), "error": why} for finding, why in mended.failed],
            "ok_after": after.ok,
            "recovered": recovered,
        }
    )
    return ExitCode.OK if after.ok or args.recover else ExitCode.DAMAGED


def _survey(backend: Backend, mirrors: Sequence[Backend], args: argparse.Namespace, output: Output) -> Survey:
    with output.counting(f"look at {args.url}") as progress:
        return survey_store(backend, mirrors=mirrors, deep=args.deep, progress=progress)


def _mend(
    backend: Backend, mirrors: Sequence[Backend], survey: Survey, args: argparse.Namespace, output: Output
) -> tuple[Mended, Survey]:
    """Mend and look again, until nothing more can be done; return all of it and the last look."""
    mended = Mended()
    if not args.repair or args.dry_run:
        return mended, survey
    for _ in range(_ROUNDS):
        if not any(finding.fix for finding in survey.findings):
            break
        with output.counting(f"mend {args.url}") as progress:
            result = mend_store(backend, survey, mirrors=mirrors, progress=progress)
        mended.done += result.done
        mended.failed = result.failed
        survey = _survey(backend, mirrors, args, output)
    return mended, survey


def _print(output: Output, args: argparse.Namespace, survey: Survey, mended: Mended, after: Survey) -> None:
    print_survey(output, survey, args.url)
    if survey.orphans:
        output.table(
            ("manifest", "snapshot", "created (UTC)", "packs", "gone"),
            [_orphan_row(orphan) for orphan in survey.orphans],
            right=("packs", "gone"),
        )
        output.line("nothing leads to these: deleted, replaced, or never committed; --recover brings one back until gc")
    if not args.repair:
        return
    if args.dry_run:
        number = sum(finding.fix is not None for finding in survey.findings)
        output.line(f"would repair {number} of {count(len(survey.findings), 'finding')}")
        return
    for finding, why in mended.failed:
        output.warn(f"not repaired: {finding.key}: {why}")
    output.line(
        f"repaired {count(len(mended.done), 'object')}; "
        + ("all is as it should be" if not after.findings else f"{count(len(after.findings), 'finding')} left"),
        "green" if after.ok else "red",
    )
    for finding in after.findings:
        output.line(f"  {finding.kind} {finding.key}: {finding.problem}; {finding.outlook}")


def _orphan_row(orphan: Orphan) -> list[str]:
    return [
        orphan.name[:16],
        f"{orphan.run}@{orphan.step}",
        format_time(orphan.created_seconds),
        str(orphan.num_packs),
        str(orphan.num_missing),
    ]


def _recover(backend: Backend, survey: Survey, args: argparse.Namespace, output: Output) -> dict[str, Any]:
    found = [orphan for orphan in survey.orphans if orphan.name.startswith(args.recover)]
    if len(found) != 1:
        there = ", ".join(orphan.name[:16] for orphan in survey.orphans[:8]) or "none"
        raise NotFoundError(
            f"cannot recover the manifest {args.recover!r}: {len(found)} manifests that nothing leads to begin so; "
            f"there are {there}"
        )
    orphan = found[0]
    name = f"{orphan.run}@{orphan.step}"
    if args.dry_run:
        output.line(f"would bring back {name} from manifest {orphan.name[:16]}")
        return {"snapshot": name, "manifest": orphan.name, "version": None}
    ref = recover(backend, orphan)
    output.line(f"{name} is back, as version {ref.version}")
    return {"snapshot": name, "manifest": orphan.name, "version": ref.version}
