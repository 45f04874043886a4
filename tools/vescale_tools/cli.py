"""The ``vescale-ckpt`` command: finds the command's module, runs it, and turns errors into exit codes.

Only the module of the command that was asked for is imported, so that help is quick.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from vescale_tools.common import UsageError, add_common_arguments, exit_code_help, exit_code_of
from vescale_tools.output import PROGRAM, Output

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final = {
    "ls": "list runs, or the snapshots of a run",
    "show": "show what a snapshot holds, without reading any tensor",
    "cat": "print a value, or a slice of a tensor",
    "diff": "compare two checkpoints: names, shapes, dtypes and values",
    "explain": "show which rank of a mesh would read what of a snapshot",
    "du": "show what runs, snapshots and tensors take, and what sharing saved",
    "verify": "read everything and compare it with its digests",
    "fsck": "hold all objects of a store against one another, and repair",
    "convert": "turn a checkpoint of one format into another",
    "doctor": "examine a store, and what its storage really does",
    "export": "write a snapshot's tensors as safetensors",
    "report": "write a page with pictures about a run",
    "tag": "name a snapshot, so that it is kept",
    "rm": "remove snapshots from their run",
    "prune": "remove the snapshots of runs that a rule does not keep",
    "gc": "collect what no snapshot and no tag needs",
    "repack": "rewrite packs that are mostly not needed, then collect",
    "mirror": "make the snapshots of a store be in another one too",
    "completion": "print a script that completes this command line in a shell",
}
"""Command -> what it does; its module is ``cmd_<command>``."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process, so that errors leave by one door."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command line, with the arguments of one command or, for None, of none."""
    parser = _Parser(
        prog=PROGRAM,
        description="Look into checkpoint stores, compare and verify them, repair, thin out and copy them.",
        epilog=exit_code_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {importlib.metadata.version(PROGRAM)}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, summary in COMMANDS.items():
        child = subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=exit_code_help(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == command:
            _module(name).add_arguments(child)
            add_common_arguments(child)
    return parser


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command alone."""
    parser = _Parser(prog=f"{PROGRAM} {name}", allow_abbrev=False)
    _module(name).add_arguments(parser)
    add_common_arguments(parser)
    return parser


def _module(command: str) -> Any:
    return importlib.import_module(f"vescale_tools.cmd_{command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((text for text in arguments if text in COMMANDS), None)
    output = Output(as_json="--json" in arguments, debug="--debug" in arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no error
    try:
        code = _run(arguments, command)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as error:
        output.fail(error)
        return exit_code_of(error)
    except Exception as error:  # noqa: BLE001 - the last line of the program
        output.fail(error)
        return exit_code_of(error)
    return code


def _run(arguments: Sequence[str], command: str | None) -> int:
    try:
        args = build_parser(command).parse_args(arguments)
    except SystemExit as end:  # --help and --version have printed what was asked for
        return int(end.code or 0)
    return int(_module(args.command).run(args))


if __name__ == "__main__":
    sys.exit(main())
