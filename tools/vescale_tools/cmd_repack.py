"""``repack``: rewrites packs of which less than half is needed, and collects what that leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_tools.cmd_gc import add_grace_argument, collect
from vescale_tools.common import add_dry_run_argument, add_url_argument

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    add_grace_argument(parser)
    add_dry_run_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Repack, collect, and return the exit code."""
    return collect(args, repack=True)
