from __future__ import annotations

import torch

import vescale_ckpt as vc

NAME = "gpt [0]*@10"


def test_the_tree(command, url):
    result = command("show", url, NAME)
    assert (result.code, result.err) == (0, "")
    body = [" ".join(line.split()) for line in result.lines[1:-3]]
    assert body == [
        "model dict of 5 keys",
        "embed.weight float32 (50, 16) 3.20 kB 1",
        "norm.weight float32 (16,) 64 B 1",
        "ids int64 (8,) 64 B 1",
        "head.weight float32 (50, 16) = model.embed.weight",
        "_extra_state uint8 (3,) 3 B 1 bytes_io",
        "optimizer dict of 2 keys",
        "state dict of 1 key",
        "embed.weight dict of 1 key",
        "exp_avg float32 (50, 16) 3.20 kB 1",
        "lr float 0.5",
        "rng value per rank",
        "0 int64 (4,) 32 B 1",
        "epoch int 3",
        r"note str 'a\x1b[31mb'",
    ]
    assert result.lines[2].startswith("  embed.weight ")
    assert result.lines[10].startswith("      exp_avg ")
    assert result.lines[-3] == ""
    assert 'saved by 1 rank, metadata {"loss": 2.5}' in result.lines[-2]
    assert result.lines[-1] == "7 tensors (1 tied), 3 plain values, 6.56 kB; 6 chunks in 1 pack, 6.56 kB stored"


def test_full_names(command, url):
    lines = command("show", url, NAME, "--flat").lines
    assert lines[1].split()[0] == "model.embed.weight"
    assert any(line.startswith("optimizer.state.embed.weight.exp_avg") for line in lines)


def test_as_json(command, url):
    result = command("show", url, NAME, "--json").json
    assert (result["snapshot"], result["version"], result["world_size"]) == (NAME, 1, 1)
    assert result["metadata"] == {"loss": 2.5}
    tensors = {tensor["name"]: tensor for tensor in result["tensors"]}
    assert tensors["model.head.weight"] == {
        "name": "model.head.weight",
        "path": ["model", "head.weight"],
        "kind": "tensor",
        "dtype": "float32",
        "shape": [50, 16],
        "bytes": 3200,
        "chunks": 0,
        "stored_bytes": 0,
        "alias_of": "model.embed.weight",
    }
    assert tensors["rng.0"]["path"] == ["rng", 0]
    assert {"name": "epoch", "path": ["epoch"], "type": "int", "value": 3} in result["values"]
    assert {"name": "note", "path": ["note"], "type": "str", "value": "a\x1b[31mb"} in result["values"]
    assert result["totals"] == {
        "tensors": 7,
        "aliases": 1,
        "bytes": 6563,
        "stored_bytes": 6563,
        "chunks": 6,
        "packs": 1,
    }


def names(result):
    return [tensor["name"] for tensor in result.json["tensors"]]


def test_names_prefixes_and_globs(command, url):
    assert names(command("show", url, NAME, "model.ids", "--json")) == ["model.ids"]
    assert names(command("show", url, NAME, "optimizer", "--json")) == ["optimizer.state.embed.weight.exp_avg"]
    assert names(command("show", url, NAME, "*.weight", "--json")) == [
        "model.embed.weight",
        "model.norm.weight",
        "model.head.weight",
        "optimizer.state.embed.weight.exp_avg",
    ]
    assert names(command("show", url, NAME, "rng", "model.n*", "--json")) == ["model.norm.weight", "rng.0"]
    assert command("show", url, NAME, "epoch", "--json").json["totals"]["tensors"] == 0


def test_a_part_is_shown_with_what_it_is_in(command, url):
    result = command("show", url, NAME, "*.exp_avg")
    starts = [line.split("  ")[0] or line.strip().split()[0] for line in result.lines[1:-3]]
    assert starts == ["optimizer", "state", "embed.weight", "exp_avg"]
    assert result.lines[-1].startswith("1 tensor (0 tied), 0 plain values, 3.20 kB")


def test_what_is_not_there(command, url):
    result = command("show", url, NAME, "nope")
    assert (result.code, result.out) == (10, "")
    assert "'nope'" in result.err
    assert command("show", url, "gpt [0]*@11").code == 10
    assert command("show", url, "gpt [0]*@best").code == 10
    assert command("show", url, "none").code == 10
    assert command("show", url, "@1").code == 2


def test_the_newest_and_a_tag(command, url):
    assert command("show", url, "gpt [0]*", "--json").json["snapshot"] == "gpt [0]*@20"
    command("tag", url, NAME, "first")
    assert command("show", url, "gpt [0]*@first", "--json").json["snapshot"] == NAME


def test_odd_states(command):
    url = "memory://tools-show"
    values = {
        "big": 10**400,
        "bytes": b"\x00\xff",
        "nan": float("nan"),
        "none": None,
        "dtype": torch.bfloat16,
        5: "int key",
    }
    with vc.open_store(url) as store, vc.Checkpointer(store, "odd") as checkpointer:
        checkpointer.save(0, torch.ones(2))
        checkpointer.save(1, values)
        checkpointer.save(2, {})
        checkpointer.save(3, {"a.b": torch.zeros(1), "a": {"b": torch.zeros(2), "empty": {}}})
    assert "(the state itself)" in command("show", url, "odd@0").out
    result = command("show", url, "odd@1")
    assert (result.code, result.err) == (0, "")
    assert "torch.dtype" in result.out
    assert max(map(len, result.lines)) < 200
    found = {value["name"]: value for value in command("show", url, "odd@1", "--json").json["values"]}
    assert found["big"]["value"] == 10**400
    assert (found["bytes"]["value"], found["bytes"]["type"]) == (None, "bytes")
    assert found["nan"]["value"] == "nan"
    assert found["dtype"]["type"] == "torch.dtype"
    assert found["5"]["path"] == [5]
    assert command("show", url, "odd@2").lines[-1].startswith("0 tensors")
    both = command("show", url, "odd@3", "--json").json["tensors"]
    assert [(tensor["name"], tensor["path"]) for tensor in both] == [("a.b", ["a.b"]), ("a.b", ["a", "b"])]


def test_statistics(command, url):
    result = command("show", url, NAME, "model.ids", "rng", "--stats")
    assert result.code == 0
    line = next(line for line in result.lines if line.startswith("model.ids  ") and "." in line.split()[3])
    assert line.split() == ["model.ids", "0", "7", "3.5", "2.291", "1", "0", "0"]
    tensors = command("show", url, NAME, "model", "--stats", "--json").json["tensors"]
    by_name = {tensor["name"]: tensor["stats"] for tensor in tensors}
    assert by_name["model.norm.weight"] == {
        "count": 16,
        "min": 1.0,
        "max": 1.0,
        "mean": 1.0,
        "std": 0.0,
        "zeros": 0,
        "nan": 0,
        "inf": 0,
    }
    assert by_name["model.head.weight"] == by_name["model.embed.weight"]


def test_statistics_of_what_torch_cannot_convert(command, tmp_path):
    state = {"four": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "none": torch.zeros(0)}
    with vc.open_store(tmp_path / "s") as store, vc.Checkpointer(store, "run") as checkpointer:
        checkpointer.save(1, state)
    tensors = command("show", tmp_path / "s", "run@1", "--stats", "--json").json["tensors"]
    assert tensors[0]["stats"] is None
    assert tensors[1]["stats"]["min"] is None
    assert "?" in command("show", tmp_path / "s", "run@1", "--stats").out
