"""Every case has its test: which file it is in, and that the file still speaks of it."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

FILES = {
    "cases/test_resharding.py": (1, 3, 5, 7, 9, 11, 13, 15, 17, 19),
    "cases/test_empty_shards.py": (20, 22, 24),
    "cases/test_dtype.py": (26, 28, 30, 32, 34),
    "cases/test_aliasing.py": (36, 38, 40, 42),
    "cases/test_async.py": (44, 46, 48),
    "cases/test_crash.py": (50, 52, 54, 56, 58),
    "cases/test_s3_faults.py": (60, 62, 64, 66, 68, 70),
    "cases/test_collecting.py": (52, 58, 72, 74, 76, 78, 138),
    "cases/test_concurrency.py": (80, 82, 84),
    "cases/test_memory.py": (86, 88),
    "cases/test_naming.py": (90, 92, 94),
    "cases/test_convert.py": (96, 98, 100, 102),
    "cases/test_security.py": (106, 108, 110),
    "cases/test_training_resume.py": (104, 112, 114, 116, 120, 122),
    "cases/test_performance.py": (136, 140),
    "distributed/test_reshard.py": (11, 132),
    "train/engine/test_checkpoint.py": (118, 134),
}
OF_PIPELINES = {124, 126, 128, 130}
"""Gradients and schedules of a pipeline, which the training package is tested for on its own."""


@pytest.mark.parametrize("file", FILES)
def test_the_file_speaks_of_its_cases(file):
    text = (TESTS / file).read_text()
    assert [f"C{number:03}" for number in FILES[file] if f"C{number:03}" not in text] == []


def test_no_case_is_without_a_file():
    every = {*range(1, 20, 2), *range(20, 141, 2)}
    assert every - OF_PIPELINES == {number for numbers in FILES.values() for number in numbers}
