"""Fixtures that every test may ask for: a real S3 server, started once and only if something needs it."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from vescale_tools.seaweed import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before anything imports torch: what many processes compute side by side has the same bits with the same threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test is about time, and a busy machine is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Place:
    """A bucket and prefix that nobody else uses."""

    url: str
    storage_options: dict[str, Any]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A running server with the bucket ``tests``."""
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        server.create_bucket("tests")
        yield server


@pytest.fixture
def s3_url(s3_server: SeaweedServer) -> S3Place:
    """A fresh prefix on the server, and what a client needs to reach it."""
    return S3Place(url=f"s3://tests/{uuid.uuid4().hex}", storage_options=s3_server.storage_options)
