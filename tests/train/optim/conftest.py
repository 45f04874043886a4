"""What four ranks say, asked once for all the files here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch


@pytest.fixture(scope="session")
def more_world(tmp_path_factory) -> list[dict]:
    """Return what ``more_world.py`` found, each rank for itself."""
    world = Path(__file__).with_name("more_world.py")
    return launch(f"{world}:check", 4, deadline_seconds=240, folder=str(tmp_path_factory.mktemp("more")))
