from __future__ import annotations

import argparse

import pytest

from vescale_ckpt import errors
from vescale_tools.common import (
    EXIT_CODES,
    MEANINGS,
    ExitCode,
    exit_code_help,
    exit_code_of,
    parse_count,
    parse_duration,
    parse_size,
    storage_options,
)

CODES = {
    errors.VeScaleError: 1,
    errors.InvalidInputError: 2,
    errors.ConfigError: 2,
    errors.LayoutError: 2,
    errors.MismatchError: 1,
    errors.NotFoundError: 10,
    errors.ObjectNotFoundError: 10,
    errors.RefNotFoundError: 10,
    errors.SnapshotNotFoundError: 10,
    errors.StoreNotFoundError: 10,
    errors.AlreadyExistsError: 11,
    errors.ConflictError: 11,
    errors.FormatError: 3,
    errors.CorruptionError: 3,
    errors.UnsupportedVersionError: 12,
    errors.StorageError: 1,
    errors.AccessDeniedError: 13,
    errors.ThrottledError: 1,
    errors.StorageTimeoutError: 1,
    errors.NoSpaceError: 1,
    errors.RankFailureError: 1,
    errors.StateError: 1,
    errors.InternalError: 1,
}


def test_every_error_has_the_exit_code_that_is_written_down():
    known = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.VeScaleError)}
    assert known == CODES.keys()
    assert {cls: int(exit_code_of(cls("x"))) for cls in known} == CODES


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (PermissionError(13, "no"), 13), (OSError(5, "io"), 1), (KeyError(), 1)],
)
def test_other_errors(error, code):
    assert exit_code_of(error) == code


def test_the_codes_are_pinned():
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "FAILED": 1,
        "USAGE": 2,
        "DAMAGED": 3,
        "NOT_FOUND": 10,
        "CONFLICT": 11,
        "UNSUPPORTED_VERSION": 12,
        "ACCESS_DENIED": 13,
        "INTERRUPTED": 130,
    }
    assert MEANINGS.keys() == set(ExitCode)
    assert {code for _, code in EXIT_CODES} | {ExitCode.OK} == set(ExitCode)
    assert all(f"{code:<4d} {meaning}" in exit_code_help() for code, meaning in MEANINGS.items())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("1.5 GB", 15 * 10**8),
        ("2GiB", 2 << 30),
        ("64KiB", 64 << 10),
        ("64kB", 64_000),
        ("64K", 64_000),
        ("1TB", 10**12),
        ("1000", 1000),
        ("7B", 7),
        (" 3M ", 3 * 10**6),
    ],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5XB", "5 G B", "1e9", "0.4B", "5mb"])
def test_no_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        parse_size(text)


def test_storage_options_nest_and_have_types():
    pairs = [
        "anon=true",
        "client_kwargs.endpoint_url=http://127.0.0.1:9000/?a=b",
        "client_kwargs.verify=false",
        "config_kwargs.connect_timeout=5",
        "key=0123",
        "secret=1e5",
        'config_kwargs.s3={"addressing_style": "path"}',
        'quoted="12"',
        "empty=",
        "nothing=null",
    ]
    assert storage_options(pairs) == {
        "anon": True,
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:9000/?a=b", "verify": False},
        "config_kwargs": {"connect_timeout": 5, "s3": {"addressing_style": "path"}},
        "key": "0123",
        "secret": "1e5",
        "quoted": "12",
        "empty": "",
        "nothing": None,
    }


def test_the_environment_gives_defaults():
    variable = '{"key": "k", "client_kwargs": {"endpoint_url": "a", "region_name": "r"}}'
    assert storage_options(["client_kwargs.endpoint_url=b"], variable) == {
        "key": "k",
        "client_kwargs": {"endpoint_url": "b", "region_name": "r"},
    }


@pytest.mark.parametrize(
    "pairs",
    [["secretvalue"], ["=secretvalue"], ["a..b=secretvalue"], ["a=1", "a.b=secretvalue"], ["a=1", "a=secretvalue"]],
)
def test_storage_options_that_cannot_be_do_not_show_values(pairs):
    with pytest.raises(errors.ConfigError, match="--storage-option") as caught:
        storage_options(pairs)
    if pairs != ["secretvalue"]:
        assert "secretvalue" not in str(caught.value)


@pytest.mark.parametrize("variable", ["secret", "[1]", '"secret"'])
def test_an_environment_that_cannot_be(variable):
    with pytest.raises(errors.ConfigError, match="VESCALE_STORAGE_OPTIONS: it is no JSON object"):
        storage_options([], variable)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("30s", 30), ("90m", 5400), ("1.5h", 5400), ("24 h", 86400), ("7d", 604800)],
)
def test_times(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1", "1w", "1h30m", "1e3"])
def test_no_times(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no time"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "x", "\u0661"])
def test_no_counts(text):
    assert parse_count("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match="is no number of 1 or more"):
        parse_count(text)
