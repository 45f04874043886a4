"""A store of its own for each test."""

from __future__ import annotations

import uuid

import pytest

import vescale_ckpt as vc


@pytest.fixture
def store():
    return vc.open_store(f"memory://{uuid.uuid4().hex}")
