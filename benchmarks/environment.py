"""Where and with what a run was made: what a result must say to be believed. No host name."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch",
    "numpy",
    "blake3",
    "safetensors",
    "fsspec",
    "s3fs",
    "aiobotocore",
    "obstore",
    "zstandard",
    "tensorstore",
)
PEERS = ("safetensors", "obstore", "tensorstore")
"""Packages that some sides need and a plain installation may lack."""


def describe() -> dict[str, Any]:
    """Return the environment as a JSON object."""
    return {
        "revision": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions(PACKAGES),
        "missing": sorted(set(PEERS) - set(versions(PEERS))),
        "host": {
            "cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "machine": platform.machine(),
            "cpu": _cpu(),
            "system": f"{platform.system()} {platform.release().split('-')[0]}",
        },
    }


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return name -> version of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def load_average() -> float:
    """Return how many processes wanted to run in the last minute: what the machine did besides."""
    return os.getloadavg()[0]


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - our own command line
            ["git", *arguments],  # noqa: S607 - whichever git the path has
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu() -> str:
    if sys.platform != "linux":
        return platform.processor()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
