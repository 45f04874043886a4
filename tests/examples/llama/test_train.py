"""The script as a user starts it: under torchrun on one mesh, then alone, and on from one another's checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama" / "train.py"
SETTINGS = ["--context=32", "--global-batch=4", "--micro-batches=4", "--save-every=2", "--device=cpu", "--exact"]

pytestmark = pytest.mark.distributed


def run(folder, name, *more, ranks=1, store="store"):
    """Run the script and return its losses by step."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1",
                "--master-port", str(20_000 + os.getpid() % 9000)] if ranks > 1 else []  # fmt: skip
    arguments = [f"--store={folder / store}", f"--losses={folder / name}", *SETTINGS, *more]
    environment = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLE), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {int(step): loss for step, loss in json.loads((folder / name).read_text()).items()}, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    found = {"alone": run(folder, "alone", "--steps=6", store="other")}
    found["together"] = run(folder, "together", "--steps=4", "--mesh=tp=2", f"--trace={folder / 'trace'}", ranks=2)
    found["resumed"] = run(folder, "resumed", "--steps=6", "--resume")
    return folder, found


def test_two_ranks_learn_what_one_does_to_the_bit(runs):
    alone, together = runs[1]["alone"][0], runs[1]["together"][0]
    assert sorted(alone) == [1, 2, 3, 4, 5, 6]
    assert together == {step: alone[step] for step in (1, 2, 3, 4)}
    assert alone[6] < alone[1]


def test_one_rank_goes_on_from_what_two_have_saved(runs):
    alone, resumed = runs[1]["alone"][0], runs[1]["resumed"][0]
    assert resumed == {step: alone[step] for step in (5, 6)}


def test_progress_and_a_trace_of_all_ranks_are_shown(runs):
    folder, found = runs
    assert "step 6/6 · loss" in found["alone"][1]
    trace = json.loads((folder / "trace" / "trace.json").read_text())
    names = {(event["pid"], event["name"]) for event in trace["traceEvents"]}
    assert {(rank, name) for rank in (0, 1) for name in ("forward", "backward", "optimizer")} <= names
    assert "checkpoint save write" in {name for _, name in names}
    assert "Training of a Llama" in (folder / "trace" / "trace.html").read_text()
