import itertools
import time

import torch

import vescale_ckpt as vc
from vescale_train.timeline.checkpoint import load_spans, save_spans


def test_phases_stand_one_behind_the_other():
    seconds = {"plan": 1.0, "stage": 2.0, "stage_overlapped": 4.0, "write": 8.0, "commit": 0.5, "total": 9.5}
    spans = save_spans(seconds, start_ns=10**9, rank=3, step=7)
    times = {span.name.rpartition(" ")[2]: (span.start_ns / 1e9, span.stop_ns / 1e9) for span in spans}
    assert times == {
        "plan": (1, 2),
        "stage": (2, 4),
        "stage_overlapped": (4, 8),
        "write": (2, 10),
        "commit": (10, 10.5),
    }
    assert {(span.rank, span.step, span.kind) for span in spans} == {(3, 7, "checkpoint")}


def test_phases_that_a_report_lacks_take_no_time():
    assert save_spans({}, start_ns=5, rank=0, step=0) == []
    (commit,) = save_spans({"commit": 2e-9}, start_ns=5, rank=0, step=0)
    assert (commit.start_ns, commit.stop_ns) == (5, 7)


def test_a_real_save_and_load_fit_between_call_and_return(tmp_path):
    store = vc.open_store(tmp_path / "store")
    with vc.Checkpointer(store, "run") as checkpointer:
        state = {"weight": torch.arange(1000.0)}
        before = time.monotonic_ns()
        report = checkpointer.save(3, state).result()
        between = time.monotonic_ns()
        loaded = checkpointer.load(state)
        after = time.monotonic_ns()
    saved = save_spans(report.seconds, start_ns=before, rank=0, step=3)
    assert {"plan", "stage", "write", "commit"} <= {span.name.rpartition(" ")[2] for span in saved}
    assert all(before <= span.start_ns <= span.stop_ns <= between for span in saved)
    spans = load_spans(loaded.seconds, start_ns=between, rank=0, step=3)
    assert [span.name.rpartition(" ")[2] for span in spans] == ["open", "plan", "read", "finish"]
    assert all(one.stop_ns == other.start_ns for one, other in itertools.pairwise(spans))
    assert spans[-1].stop_ns <= after
