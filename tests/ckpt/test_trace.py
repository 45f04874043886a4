from __future__ import annotations

import json
import time
import uuid

import pytest
import torch

import vescale_ckpt as vc
from tests.cases.worlds import checkpointer
from tests.distributed.threads import all_well, run_ranks
from vescale_ckpt.errors import FormatError, NotFoundError
from vescale_ckpt.trace import Phases, Span, events, merge_traces, write_trace
from vescale_storage.wrappers.faults import FaultBackend, Rule


def test_a_phase_is_a_span_from_when_it_began():
    phases, before = Phases(), time.time()
    began = time.monotonic()
    phases.end("plan", began)
    phases.end("write", began, "background")
    assert list(phases.seconds) == ["plan", "write"]
    first, second = phases.spans
    assert (first.name, first.track, second.track) == ("plan", "caller", "background")
    assert abs(first.began_seconds - before) < 1
    assert second.seconds >= first.seconds == phases.seconds["plan"] >= 0


def test_events_are_what_perfetto_reads():
    spans = [Span("plan", "caller", 5.0, 0.25), Span("write", "background", 5.5, 1.0), Span("x", "caller", 6.0, 0.0)]
    names, found = events(spans, title="run@3 save", rank=7)[:3], events(spans, title="run@3 save", rank=7)[3:]
    assert [(e["ph"], e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in names] == [
        ("M", "process_name", 7, 0, "rank 7"),
        ("M", "thread_name", 7, 0, "caller"),
        ("M", "thread_name", 7, 1, "background"),
    ]
    assert [(e["ph"], e["name"], e["tid"], e["ts"], e["dur"]) for e in found] == [
        ("X", "plan", 0, 5_000_000, 250_000),
        ("X", "write", 1, 5_500_000, 1_000_000),
        ("X", "x", 0, 6_000_000, 0),
    ]


def read(path):
    return json.loads(path.read_text())["traceEvents"]


def test_saves_and_loads_of_all_ranks_become_one_trace(tmp_path):
    store = vc.open_store(f"memory://{uuid.uuid4().hex}")

    def body(group):
        state = {"w": torch.arange(1000.0), "rng": vc.PerRank(group.rank)}
        ckpt = checkpointer(store, group, trace_folder=tmp_path / "traces")
        ckpt._read_options = vc.ReadOptions(trace_folder=tmp_path / "traces")
        with ckpt:
            for step, blocking in ((1, True), (2, False)):
                ckpt.save(step, state, blocking=blocking).result()
            ckpt.load(state)

    all_well(run_ranks(3, body))
    assert merge_traces(tmp_path / "traces", tmp_path / "all.json") == 9
    found = read(tmp_path / "all.json")
    spans = [event for event in found if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2}
    phases = {
        title: [e["name"] for e in spans if e["cat"] == title and e["pid"] == 1]
        for title in {event["cat"] for event in spans}
    }
    assert phases.keys() == {"run@1 save", "run@2 save", "run@2 load"}
    assert set(phases["run@1 save"]) == {"plan", "stage", "write", "commit", "total"}
    assert set(phases["run@2 load"]) == {"open", "plan", "read", "finish", "total"}
    assert [e["ts"] for e in spans] == sorted(e["ts"] for e in spans)
    assert sum(event["name"] == "process_name" for event in found) == 3, "each rank is named once"


def test_a_save_that_fails_leaves_its_trace(tmp_path):
    store = vc.open_store(f"memory://{uuid.uuid4().hex}")
    faults = FaultBackend(store.backend)
    faults.add(Rule(verb="put_if_absent", prefix="packs/", error=OSError("no")))
    options = vc.SaveOptions(trace_folder=tmp_path)
    with (
        pytest.raises(OSError, match="no"),
        vc.Checkpointer(vc.Store(faults, exists=False), "run", options=options) as c,
    ):
        c.save(0, {"w": torch.ones(3)})
    (file,) = tmp_path.iterdir()
    assert {"plan", "stage"} <= {event["name"] for event in read(file)}


def test_a_folder_that_cannot_be_written_does_not_fail_the_save(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    write_trace(tmp_path / "file", Phases(), title="run@1 save", rank=0)
    assert "cannot write the trace of run@1 save on rank 0" in caplog.text


def test_what_is_no_trace_is_told(tmp_path):
    with pytest.raises(NotFoundError, match=r"trace\.json"):
        merge_traces(tmp_path, tmp_path / "out.json")
    for wrong in ("{", "[]", "{}"):
        (tmp_path / "x.trace.json").write_text(wrong)
        with pytest.raises(FormatError, match=r"x\.trace\.json"):
            merge_traces(tmp_path, tmp_path / "out.json")
