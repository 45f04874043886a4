from __future__ import annotations

import io
import json
from typing import NamedTuple

import pytest
import torch

import vescale_ckpt as vc
from vescale_tools import cli


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def lines(self):
        return self.out.splitlines()


@pytest.fixture
def command(capsys):
    """Run the command line in this process and return its exit code and what it printed."""

    def call(*arguments):
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return call


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    embed = torch.nn.Parameter(torch.randn(50, 16, generator=generator))
    return {
        "model": {
            "embed.weight": embed,
            "norm.weight": torch.ones(16),
            "ids": torch.arange(8),
            "head.weight": embed,
            "_extra_state": io.BytesIO(b"abc"),
        },
        "optimizer": {"state": {"embed.weight": {"exp_avg": torch.randn(50, 16, generator=generator)}}, "lr": 0.5},
        "rng": vc.PerRank(torch.arange(4)),
        "epoch": 3,
        "note": "a\x1b[31mb",
    }


@pytest.fixture
def url(tmp_path):
    """Make a store with two snapshots of one run and one of another, the second tagged."""
    path = tmp_path / "store"
    with vc.open_store(path) as store:
        with vc.Checkpointer(store, "gpt [0]*") as checkpointer:
            checkpointer.save(10, make_state(), metadata={"loss": 2.5})
            checkpointer.save(20, make_state(1))
        with vc.Checkpointer(store, "other") as checkpointer:
            checkpointer.save(0, {"w": torch.zeros(3)})
    return path


@pytest.fixture
def damage():
    """Flip a byte of an object."""

    def flip(path, at):
        data = bytearray(path.read_bytes())
        data[at] ^= 0x40
        path.chmod(0o644)
        path.write_bytes(data)

    return flip
