"""The in-memory store, as a fixture: test files of one name may repeat, so none can be imported by name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).with_name("memory_store.py")


def _load():
    spec = importlib.util.spec_from_file_location("adapters_memory_store", _PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_MODULE = _load()


@pytest.fixture
def memory():
    return _MODULE
