from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import vescale_ckpt as vc
from vescale_tools.cmd_diff import parse_sides
from vescale_tools.common import UsageError

RUN = "gpt [0]*"


def test_two_steps_of_a_run(command, url):
    result = command("diff", url, f"{RUN}@10", f"{RUN}@20")
    assert (result.code, result.err) == (0, "")
    lines = {line.split()[0]: line for line in result.lines}
    assert lines["model.embed.weight"].split()[1:5] == ["different", "800", "of", "800"]
    assert "model.norm.weight" not in lines
    assert result.lines[-2].startswith(f"A is {RUN}@10, B is {RUN}@20; of 7 tensors: 4 the same, 3 other values")
    assert "model.norm.weight" in command("diff", url, f"{RUN}@10", f"{RUN}@20", "--all").out


def test_the_same(command, url):
    result = command("diff", url, f"{RUN}@10", f"{RUN}@10", "--exit-code", "--json")
    assert result.code == 0
    assert result.json["same"] is True
    assert result.json["bytes_read"] == 0


def test_the_exit_code_tells_on_request(command, url):
    assert command("diff", url, f"{RUN}@10", f"{RUN}@20", "--exit-code").code == 1


def test_as_json(command, url):
    found = command("diff", url, f"{RUN}@10", f"{RUN}@20", "--json").json
    tensor = next(tensor for tensor in found["tensors"] if tensor["name"] == "model.embed.weight")
    assert tensor["verdict"] == "different"
    assert tensor["a"] == {"dtype": "float32", "shape": [50, 16], "bytes": 3200, "alias_of": None}
    assert tensor["compared"]["different"] == 800
    assert tensor["compared"]["max_abs"] > 0
    assert len(tensor["compared"]["at"]) == 2
    assert found["counts"]["same"] == 4
    quick = command("diff", url, f"{RUN}@10", f"{RUN}@20", "--json", "--quick").json
    assert quick["bytes_read"] == 0
    assert quick["counts"] == found["counts"]


def test_two_stores(command, url, tmp_path):
    with vc.open_store(tmp_path / "b") as store, vc.Checkpointer(store, "x") as checkpointer:
        checkpointer.save(1, {"w": torch.tensor([0.0, 0.0, 2.0]), "lr": 0.1})
    found = command("diff", url, "other@0", tmp_path / "b", "x@1", "--json").json
    assert found["tensors"][0]["compared"] == {
        "num": 3,
        "different": 1,
        "same_bits": False,
        "max_abs": 2.0,
        "max_rel": 1.0,
        "at": [2],
    }
    assert found["values"] == [{"name": "lr", "verdict": "only in B", "a": None, "b": "0.1"}]


def test_another_librarys_checkpoint(command, url, tmp_path):
    with vc.open_store(url) as store:
        state = store[f"{RUN}@10"].state_dict()
    weights = {name: state["model"][name].clone() for name in ("embed.weight", "norm.weight", "ids")}
    weights["norm.weight"][3] = 5
    save_file(weights, tmp_path / "model.safetensors")
    found = command("diff", url, f"{RUN}@10", tmp_path / "model.safetensors", "--below-a", "model", "--json").json
    verdicts = {tensor["name"]: tensor["verdict"] for tensor in found["tensors"]}
    assert verdicts == {
        "embed.weight": "same",
        "norm.weight": "different",
        "ids": "same",
        "head.weight": "only in A",
        "_extra_state": "only in A",
    }


def test_a_store_that_is_damaged(command, url, damage):
    pack = max((url / "packs").glob("*/*"), key=lambda path: path.stat().st_size)
    damage(pack, 100)
    assert command("diff", url, f"{RUN}@10", f"{RUN}@20").code == 3


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["other@0"], 2),
        (["other@0", "other@0", "other@0"], 2),
        (["other@0", "nope@1"], 10),
        (["other@0", "/nowhere/at/all"], 10),
        (["other@0", "other@0", "--below-a", "nope"], 10),
    ],
)
def test_bad_input(command, url, arguments, code):
    assert command("diff", url, *arguments).code == code
    assert command("diff").code == 2


@pytest.mark.parametrize(
    ("words", "sides"),
    [
        (["s", "a@1", "b"], (("s", "a@1"), ("s", "b"))),
        (["s", "a@1", "/t", "b@2"], (("s", "a@1"), ("/t", "b@2"))),
        (["s", "a@1", "./dir"], (("s", "a@1"), ("./dir", None))),
        (["./dir", "s3://b/x", "a"], (("./dir", None), ("s3://b/x", "a"))),
        (["./one", "./two"], (("./one", None), ("./two", None))),
    ],
)
def test_sides(words, sides):
    assert parse_sides(words) == sides


@pytest.mark.parametrize("words", [["s"], ["s", "a"], ["s", "a", "b", "c"], ["./a", "./b", "./c"]])
def test_no_two_sides(words):
    with pytest.raises(UsageError, match="expected two sides"):
        parse_sides(words)
