"""``completion``: prints a script that completes this command line in a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_tools.common import ExitCode
from vescale_tools.completion import SHELLS, words_of
from vescale_tools.output import Output

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    parser.add_argument(
        "shell",
        metavar="SHELL",
        choices=sorted(SHELLS),
        help="bash: add 'source <(vescale-ckpt completion bash)' to ~/.bashrc; zsh: likewise to ~/.zshrc, after "
        "compinit; fish: write it to ~/.config/fish/completions/vescale-ckpt.fish",
    )


def run(args: argparse.Namespace) -> int:
    """Print the script and return the exit code."""
    from vescale_tools.cli import COMMANDS, command_parser  # noqa: PLC0415 - it is what imports this module

    output = Output.of(args)
    script = SHELLS[args.shell]([words_of(name, text, command_parser(name)) for name, text in COMMANDS.items()])
    if not output.as_json:
        print(script, end="")
    output.emit({"shell": args.shell, "script": script})
    return ExitCode.OK
