from __future__ import annotations

import argparse
import json

import pytest

from vescale_tools.common import UsageError
from vescale_tools.meshes import MeshText, parse_mesh, read_rules


def test_a_mesh():
    assert parse_mesh("dp=2, tp=4") == MeshText(("dp", "tp"), (2, 4))
    assert str(parse_mesh("dp=2,tp=4")) == "dp 2, tp 4"


@pytest.mark.parametrize("text", ["", "dp", "dp=0", "dp=-1", "dp=2,dp=2", "dp=2,", "=2", "dp=2;tp=4"])
def test_no_mesh(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no mesh"):
        parse_mesh(text)


@pytest.mark.parametrize(
    "plan",
    [
        [],
        {"a": []},
        {"a": {"tp": 1}},
        {"a": {"tp": "S()"}},
        {"a": {"tp": "Partial()"}},
        {"(": {"tp": "R"}},
    ],
)
def test_no_plan(tmp_path, plan):
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UsageError, match=r"cannot use the plan .*plan\.json"):
        read_rules(str(tmp_path / "plan.json"))


def test_a_plan_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError):
        read_rules(str(tmp_path / "none"))
    (tmp_path / "text").write_text("{")
    with pytest.raises(UsageError):
        read_rules(str(tmp_path / "text"))
