"""C086 and C088: states that were held whole, or twice, in host memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.distributed.launch import launch

MIB = 1 << 20


class TestC086ShareOfARank:
    @pytest.mark.distributed
    def test_a_save_and_a_load_stay_near_the_ranks_own_share(self, tmp_path):
        ranks = launch(
            "case_world.py:memory", 4, deadline_seconds=240, folder=str(tmp_path), num_tensors=40, num_rows=1000
        )
        for found in ranks:
            share, tensor = found["share"], 4_000_000
            assert share == 40 * 1_000_000
            assert found["save"] <= 1.5 * share + tensor, found
            assert found["load"] <= 1.5 * share + tensor, found
            assert found["bounded"] <= 1.5 * (32 * MIB) + tensor, found

    @pytest.mark.distributed
    def test_256_mib_over_four_ranks_stay_within_a_budget_and_50_saves_leave_nothing(self, tmp_path):
        for found in launch("case_world.py:budget", 4, deadline_seconds=240, folder=str(tmp_path), num_saves=50):
            assert found["share"] == 64 * MIB
            assert found["growth"] <= (32 + 16) * MIB, found
            assert found["flat"] <= 4 * MIB, found


class TestC088WithinABudget:
    SCRIPT = """
import json, sys
from pathlib import Path
import torch, vescale_ckpt as vc
from vescale_ckpt.interop.safetensors import ExportOptions, check_target, export_snapshot, load_hf, plan_export

def status(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))
    return int(line.split()[1]) * 1024

def peak(body):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    body()
    return status("VmHWM") - before

folder = Path(sys.argv[1])
store = vc.open_store(folder / "store")
tensors = {f"t{i}": torch.rand(4_000_000) for i in range(12)}
with vc.Checkpointer(store, "run") as ckpt:
    ckpt.save(0, {"model": tensors})
del tensors
snapshot = store["run"]
plan = plan_export(snapshot.manifest, ExportOptions(max_shard_bytes=100_000_000))
target = check_target(folder / "hf")
found = {"export": peak(lambda: export_snapshot(snapshot, plan, target, buffer_bytes=16 << 20))}
state = load_hf(folder / "hf")
with vc.Checkpointer(store, "back", options=vc.SaveOptions(host_budget_bytes=64 << 20)) as ckpt:
    found["import"] = peak(lambda: ckpt.save(0, state))
    found["deduplicated"] = ckpt.save(1, state, base="run@0").result().bytes_deduplicated
for i in range(12):
    assert torch.equal(store["back"].read(f"model.t{i}"), snapshot.read(f"model.t{i}"))
print(json.dumps(found))
"""

    def test_native_to_safetensors_and_back(self, tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", self.SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        tensor, state = 4_000_000 * 4, 12 * 4_000_000 * 4
        # Reading holds spans of up to 16 MiB on a few threads, beside the buffer.
        assert found["export"] < 16 * MIB + tensor + 96 * MIB < state, found
        assert found["import"] < 64 * MIB + tensor < state, found
        assert found["deduplicated"] == 12 * 4_000_000 * 4
