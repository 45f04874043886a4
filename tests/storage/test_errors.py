"""Walks the error trees of storage and checkpoint package: kinds, builtins, text and the way across process borders."""

from __future__ import annotations

import concurrent.futures
import copy
import multiprocessing

import pytest

from vescale_ckpt import errors as ckpt_errors
from vescale_storage import errors

# Append-only: programs match these strings.
KINDS = {
    "VeScaleError": "error",
    "InvalidInputError": "invalid_input",
    "ConfigError": "config",
    "LayoutError": "layout",
    "MismatchError": "mismatch",
    "NotFoundError": "not_found",
    "ObjectNotFoundError": "object_not_found",
    "RefNotFoundError": "ref_not_found",
    "StoreNotFoundError": "store_not_found",
    "SnapshotNotFoundError": "snapshot_not_found",
    "AlreadyExistsError": "already_exists",
    "ConflictError": "conflict",
    "FormatError": "format",
    "UnsupportedVersionError": "unsupported_version",
    "CorruptionError": "corruption",
    "StorageError": "storage",
    "AccessDeniedError": "access_denied",
    "ThrottledError": "throttled",
    "StorageTimeoutError": "timeout",
    "NoSpaceError": "no_space",
    "RankFailureError": "rank_failure",
    "StateError": "state",
    "InternalError": "internal",
}

COMPATIBLE = {
    "InvalidInputError": ValueError,
    "ConfigError": ValueError,
    "LayoutError": ValueError,
    "MismatchError": ValueError,
    "NotFoundError": LookupError,
    "ObjectNotFoundError": FileNotFoundError,
    "RefNotFoundError": LookupError,
    "SnapshotNotFoundError": LookupError,
    "AlreadyExistsError": FileExistsError,
    "UnsupportedVersionError": errors.FormatError,
    "CorruptionError": errors.FormatError,
    "StorageError": OSError,
    "AccessDeniedError": OSError,
    "ThrottledError": OSError,
    "NoSpaceError": OSError,
    "StorageTimeoutError": TimeoutError,
    "StateError": RuntimeError,
    "InternalError": AssertionError,
}

LIBRARIES = ("vescale_storage.", "vescale_ckpt.")
"""Shells may have errors of their own, and another test may have imported them."""


def walk(cls: type[errors.VeScaleError]) -> list[type[errors.VeScaleError]]:
    found = [cls]
    for child in cls.__subclasses__():
        if child.__module__.startswith(LIBRARIES):
            found += walk(child)
    return list(dict.fromkeys(found))


TREE = walk(errors.VeScaleError)


def make(cls: type[errors.VeScaleError]) -> errors.VeScaleError:
    context = {"rank": 3, "key": "packs/ab", "snapshot": "run@5"}
    if issubclass(cls, errors.StorageError):
        return cls("cannot do it", retryable=True, **context)
    if issubclass(cls, errors.RankFailureError):
        return cls("cannot do it", failures={3: "broken"}, **context)
    return cls("cannot do it", **context)


def test_kinds_are_unique_and_never_change():
    assert {cls.__name__: cls.__dict__.get("kind") for cls in TREE} == KINDS
    assert len(set(KINDS.values())) == len(KINDS)


def test_all_are_exported_from_the_checkpoint_package():
    assert {cls.__name__ for cls in TREE} == set(ckpt_errors.__all__)
    for cls in TREE:
        assert getattr(ckpt_errors, cls.__name__) is cls


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_each_is_an_exception_with_message_and_context(cls):
    error = make(cls)
    assert str(error) == error.message == "cannot do it"
    assert error.context["rank"] == 3
    assert isinstance(error, Exception)
    assert isinstance(error, COMPATIBLE.get(cls.__name__, errors.VeScaleError))


def test_every_class_crosses_a_process_border_whole():
    made = [make(cls) for cls in TREE]
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        returned = list(pool.map(copy.copy, made))
    for before, after in zip(made, returned, strict=True):
        assert type(after) is type(before)
        assert (str(after), after.message, after.context) == (str(before), before.message, before.context)
        assert getattr(after, "retryable", None) == getattr(before, "retryable", None)
        assert getattr(after, "failures", None) == getattr(before, "failures", None)


def test_defaults():
    assert errors.StorageError("x").retryable is False
    assert errors.RankFailureError("x").failures == {}
    assert ckpt_errors.MismatchError("x", problems=("a", "b")).problems == ("a", "b")
    assert ckpt_errors.MismatchError("x").problems == ()
