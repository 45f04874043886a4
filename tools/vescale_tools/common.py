"""What all commands share: exit codes, the options that every one takes, and the way to the store."""

from __future__ import annotations

import argparse
import enum
import json
import os
import re
from typing import TYPE_CHECKING, Any, Final

from vescale_storage.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    UnsupportedVersionError,
    VeScaleError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vescale_ckpt.store import Store

OPTIONS_VARIABLE: Final = "VESCALE_STORAGE_OPTIONS"
_SECRETS: Final = frozenset({"key", "secret", "token", "username", "password", "account_name", "account_key"})
"""Options that stay text even where they look like a number."""
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?)?B?")
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class ExitCode(enum.IntEnum):
    """How a command ends."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DAMAGED = 3
    NOT_FOUND = 10
    CONFLICT = 11
    UNSUPPORTED_VERSION = 12
    ACCESS_DENIED = 13
    INTERRUPTED = 130


MEANINGS: Final = {
    ExitCode.OK: "all went well",
    ExitCode.FAILED: "it failed; the message says why",
    ExitCode.USAGE: "the command line is wrong, or asks for what cannot be",
    ExitCode.DAMAGED: "stored data were verified and found bad, or cannot be understood",
    ExitCode.NOT_FOUND: "there is no such store, run, snapshot, tag, tensor or file",
    ExitCode.CONFLICT: "something is in the way: a tag, another writer, files in the target folder",
    ExitCode.UNSUPPORTED_VERSION: "written by a newer version than this one can read",
    ExitCode.ACCESS_DENIED: "credentials or permissions are missing",
    ExitCode.INTERRUPTED: "interrupted",
}

EXIT_CODES: Final[tuple[tuple[type[BaseException], ExitCode], ...]] = (
    (UnsupportedVersionError, ExitCode.UNSUPPORTED_VERSION),
    (FormatError, ExitCode.DAMAGED),
    (AccessDeniedError, ExitCode.ACCESS_DENIED),
    (AlreadyExistsError, ExitCode.CONFLICT),
    (ConflictError, ExitCode.CONFLICT),
    (NotFoundError, ExitCode.NOT_FOUND),
    (InvalidInputError, ExitCode.USAGE),
    (VeScaleError, ExitCode.FAILED),
    (PermissionError, ExitCode.ACCESS_DENIED),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)
"""The first class that fits decides; anything else is ``FAILED``."""


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of an error."""
    return next((code for cls, code in EXIT_CODES if isinstance(error, cls)), ExitCode.FAILED)


def exit_code_help() -> str:
    """Return the exit codes as the end of every help."""
    return "exit codes:\n" + "\n".join(f"  {code:<4d} {meaning}" for code, meaning in MEANINGS.items())


class UsageError(ConfigError):
    """The command line cannot be understood."""

    kind = "usage"


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command has."""
    group = parser.add_argument_group("common options")
    group.add_argument("--json", action="store_true", help="print exactly one JSON object on standard output")
    group.add_argument("--debug", action="store_true", help="show where an error came from")
    group.add_argument(
        "--storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for the file system of URL, may be repeated; dots nest (client_kwargs.region_name=eu-west-1); numbers, "
        f"true, false, null and JSON are read as such. Defaults come from ${OPTIONS_VARIABLE} (a JSON object) and "
        "from what the file system reads itself, for S3 the AWS_* variables and files",
    )


def add_url_argument(parser: argparse.ArgumentParser) -> None:
    """Add the place of the store."""
    parser.add_argument("url", metavar="URL", help="the store: a path, s3://bucket/prefix, or another fsspec URL")


def add_snapshot_argument(parser: argparse.ArgumentParser) -> None:
    """Add the name of one snapshot."""
    parser.add_argument("snapshot", metavar="RUN@STEP", help="or RUN@TAG, or RUN for its newest snapshot")


def add_dry_run_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that everything which writes or deletes has."""
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the storage options of a command line.

    Raises:
        ConfigError: one of them cannot be understood.
    """
    return storage_options(args.storage_option, os.environ.get(OPTIONS_VARIABLE))


def open_existing(args: argparse.Namespace) -> Store:
    """Return the store of a command line, which must be there.

    Raises:
        StoreNotFoundError: it is not.
        ConfigError: an option is wrong.
        StorageError: the place cannot be reached.
    """
    from vescale_ckpt.store import open_store  # noqa: PLC0415 - it brings torch, which help can do without

    return open_store(args.url, storage_options=options_of(args), create=False)


def storage_options(pairs: Sequence[str], variable: str | None = None) -> dict[str, Any]:
    """Return the storage options of ``KEY=VALUE`` texts, over those of the environment variable's text.

    Raises:
        ConfigError: one of them cannot be understood. Values are not shown: they may be secret.
    """
    options = _from_variable(variable) if variable else {}
    given: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        keys = name.split(".")
        if not equals or not all(keys):
            raise UsageError(f"cannot use --storage-option {name!r}: write KEY=VALUE, or OUTER.INNER=VALUE")
        at = given
        for key in keys[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise UsageError(f"cannot use --storage-option {name!r}: {key!r} has a value of its own")
        if keys[-1] in at:
            raise UsageError(f"cannot use --storage-option {name!r}: it is given twice")
        at[keys[-1]] = text if keys[-1] in _SECRETS else _literal(text)
    return _merged(options, given)


def _from_variable(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f"cannot use ${OPTIONS_VARIABLE}: it is no JSON object")
    return options


def _literal(text: str) -> Any:
    """Return the value of a JSON text, and any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def parse_size(text: str) -> int:
    """Return the bytes of ``5GB``, ``500 MB``, ``2GiB`` or ``1000``; an argparse ``type``.

    Raises:
        argparse.ArgumentTypeError: it is no such size, or nothing.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match[2] or "" if match else ""
    factor = {**_UNITS, **_BINARY_UNITS}.get(unit if unit != "K" else "k")
    num_bytes = int(float(match[1]) * factor) if match and factor else 0
    if num_bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB, 2GiB or a number of bytes")
    return num_bytes


def parse_duration(text: str) -> float:
    """Return the seconds of ``24h``, ``90m``, ``7d``, ``30s`` or ``3600``; an argparse ``type``.

    Raises:
        argparse.ArgumentTypeError: it is no such time.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 24h, 90m, 7d, 30s or a number of seconds")
    return float(match[1]) * _SECONDS[match[2]]


def parse_count(text: str) -> int:
    """Return an int of 1 or more; an argparse ``type``.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)
