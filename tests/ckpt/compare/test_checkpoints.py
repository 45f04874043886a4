from __future__ import annotations

import uuid

import pytest
import torch

import vescale_ckpt as vc
from vescale_ckpt.compare.checkpoints import Verdict, compare
from vescale_ckpt.compare.sides import side_of_foreign, side_of_snapshot
from vescale_ckpt.errors import NotFoundError


def side(state, name="run"):
    store = vc.open_store(f"memory://{uuid.uuid4().hex}")
    with vc.Checkpointer(store, name) as checkpointer:
        checkpointer.save(1, state)
    return side_of_snapshot(store[f"{name}@1"])


def verdicts(comparison):
    return {diff.name: diff.verdict for diff in comparison.tensors}


def test_all_verdicts():
    a = {
        "same": torch.ones(3),
        "cast": torch.ones(3),
        "other": torch.zeros(3),
        "shape": torch.ones(3),
        "a": torch.ones(1),
    }
    b = {
        "same": torch.ones(3),
        "cast": torch.ones(3, dtype=torch.bfloat16),
        "other": torch.ones(3),
        "shape": torch.ones(4),
        "b": torch.ones(1),
    }
    comparison = compare(side(a), side(b))
    assert verdicts(comparison) == {
        "same": Verdict.SAME,
        "cast": Verdict.EQUAL,
        "other": Verdict.DIFFERENT,
        "shape": Verdict.SHAPE,
        "a": Verdict.ONLY_A,
        "b": Verdict.ONLY_B,
    }
    assert not comparison.are_same
    assert comparison.bytes_read == 12 + 6 + 12 + 12
    assert comparison.count(Verdict.SAME) == 1


def test_what_digests_show_is_not_read():
    state = {"w": torch.randn(1000, 300), "tied": torch.zeros(5)}
    a = side(state)
    comparison = compare(a, side(state))
    assert comparison.are_same
    assert comparison.bytes_read == 0
    quick = compare(a, side({**state, "w": state["w"] + 1}), read=False)
    assert verdicts(quick)["w"] is Verdict.DIFFERENT
    assert quick.bytes_read == 0


def test_the_same_bytes_in_other_chunks_are_the_same():
    whole = torch.arange(200.0)
    pieces = [((0,), whole[:70]), ((70,), whole[70:])]
    view = vc.ShardedView((200,), torch.float32, pieces)
    comparison = compare(side({"w": whole}), side({"w": view}))
    assert verdicts(comparison) == {"w": Verdict.SAME}
    assert comparison.bytes_read == 1600


def test_plain_values():
    a = {"lr": 0.5, "n": 1, "nan": float("nan"), "only": "a", "rng": vc.PerRank(3)}
    b = {"lr": 0.25, "n": 1.0, "nan": float("nan"), "more": None, "rng": vc.PerRank(3)}
    comparison = compare(side(a), side(b))
    assert {value.name: value.verdict for value in comparison.values} == {
        "lr": Verdict.DIFFERENT,
        "n": Verdict.DIFFERENT,
        "only": Verdict.ONLY_A,
        "more": Verdict.ONLY_B,
    }
    assert comparison.num_values == 6


def test_what_torch_cannot_convert_is_compared_as_bytes():
    def four(*values):
        return {"w": torch.tensor(values, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}

    comparison = compare(side(four(1, 2, 3)), side(four(1, 9, 3)))
    assert comparison.tensors[0].difference.num_different == 1
    other = compare(side(four(1, 2, 3)), side({"w": torch.ones(3)}))
    assert (other.tensors[0].verdict, other.tensors[0].difference) == (Verdict.DIFFERENT, None)


def test_parts_of_the_names():
    a = side({"model": {"l.w": torch.ones(2), "l.b": torch.ones(1)}, "epoch": 3})
    b = side({"l.w": torch.ones(2), "l.b": torch.ones(1)})
    assert compare(a.below("model"), b).are_same
    assert not compare(a, b).are_same
    with pytest.raises(NotFoundError, match="nope"):
        a.below("nope")


def test_another_librarys_checkpoint():
    class Other:
        url = "other://place"
        values = {"epoch": 3}  # noqa: RUF012

        def tensors(self):
            return side({"w": torch.ones(5, 2)}).tensors

        def read(self, name, box):
            return {"w": torch.ones(5, 2)}[name][box.slices]

    comparison = compare(side({"w": torch.ones(5, 2), "epoch": 3}), side_of_foreign(Other()))
    assert comparison.are_same
    assert comparison.b == "other://place"
    assert comparison.bytes_read == 80


def test_progress_counts_the_bytes_of_a():
    seen = []
    compare(side({"w": torch.ones(5), "v": torch.ones(2)}), side({"w": torch.ones(5)}), progress=seen.append)
    assert seen == [20, 8]


def test_nothing_is_the_same_as_nothing():
    assert compare(side({}), side({})).are_same
