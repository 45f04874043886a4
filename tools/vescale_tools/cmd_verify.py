"""``verify``: reads every byte that snapshots refer to and compares it with its digest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import FormatError, UnsupportedVersionError
from vescale_ckpt.repairing.survey import survey_store
from vescale_tools.common import ExitCode, UsageError, add_url_argument, open_existing, options_of, parse_count
from vescale_tools.output import Output, count, format_bytes
from vescale_tools.sizes import totals
from vescale_tools.surveys import opened, print_survey, survey_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from vescale_ckpt.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument(
        "snapshots", metavar="RUN@STEP", nargs="*", help="or RUN@TAG, or RUN for its newest; default: all of all runs"
    )
    parser.add_argument(
        "--sample",
        type=parse_count,
        metavar="N",
        help="of each snapshot read only N chunks, drawn at random, and the footers of all packs",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="draw the same sample again; default: another each time")
    parser.add_argument(
        "--deep",
        action="store_true",
        help="the whole store, every object once: packs and chunks that no snapshot needs too, footers against "
        "manifests, all versions, tags and index objects; what fsck --deep looks at",
    )


def run(args: argparse.Namespace) -> int:
    """Verify and return the exit code."""
    output = Output.of(args)
    if args.deep:
        return _verify_deep(args, output)
    if args.seed is not None and args.sample is None:
        raise UsageError("cannot use --seed without --sample: all chunks are read anyhow")
    with open_existing(args) as store:
        results = [_verify(store, name, args, output) for name in _names(store, args.snapshots)]
    bad = [result for result in results if result.problems]
    if not results:
        output.line(f"{args.url} holds no snapshots: there is nothing to verify")
    elif bad:
        num_problems = sum(len(result.problems) for result in bad)
        output.line(f"{len(bad)} of {count(len(results), 'snapshot')} are bad: {count(num_problems, 'problem')}", "red")
    else:
        output.line(f"{count(len(results), 'snapshot')} verified, nothing is wrong", "green")
    output.emit({"ok": not bad, "snapshots": [result.as_json() for result in results]})
    return ExitCode.DAMAGED if bad else ExitCode.OK


def _verify_deep(args: argparse.Namespace, output: Output) -> int:
    if args.snapshots or args.sample is not None:
        raise UsageError("cannot verify --deep a part: it looks at the whole store; leave out snapshots and --sample")
    with opened(args.url, options_of(args)) as backend, output.counting(f"verify {args.url}") as progress:
        survey = survey_store(backend, deep=True, progress=progress)
    print_survey(output, survey, args.url)
    output.emit({"url": args.url, "deep": True, **survey_json(survey)})
    return ExitCode.OK if survey.ok else ExitCode.DAMAGED


@dataclass(slots=True)
class _Result:
    name: str
    chunks: int = 0
    packs: int = 0
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": not self.problems,
            "chunks": self.chunks,
            "packs": self.packs,
            "bytes": self.bytes_read,
            "problems": self.problems,
        }


def _names(store: Store, names: Sequence[str]) -> Iterator[str]:
    """Yield the snapshots to verify; without names, every one."""
    if names:
        yield from names
        return
    for run_name in store.runs():
        yield from (info.name for info in store.snapshots(run_name))


def _verify(store: Store, name: str, args: argparse.Namespace, output: Output) -> _Result:
    """Return what is wrong with a snapshot; what the environment fails at is raised."""
    result = _Result(name)
    try:
        snapshot = store[name]
        result.name = snapshot.name
        with output.progress(snapshot.name, totals(snapshot.manifest).stored_bytes) as advance:
            report = snapshot.verify(advance, sample=args.sample, seed=args.seed)
    except UnsupportedVersionError:
        raise
    except FormatError as error:  # the ref or the manifest itself
        result.problems = [str(error)]
    else:
        result.chunks, result.packs, result.bytes_read = report.chunks, report.packs, report.bytes_read
        result.problems = list(report.problems)
    what = f"{count(result.chunks, 'chunk')} in {count(result.packs, 'pack')}, {format_bytes(result.bytes_read)}"
    if result.problems:
        output.line(f"{result.name}  BAD  {what}", "red")
        for problem in result.problems:
            output.line(f"  {problem}")
    else:
        output.line(f"{result.name}  ok  {what}")
    return result
