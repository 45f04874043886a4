"""What key maps make of checkpoints, against the same done by hand with torch, and back to the bit."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from vescale_ckpt.errors import MismatchError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.convert import convert
from vescale_ckpt.interop.foreign.detect import open_foreign
from vescale_ckpt.interop.keymap import MappedSnapshot, load_keymap

HEADS, GROUPS, HIDDEN, FFN, VOCAB = 6, 2, 24, 40, 63


def tagged(*shape: int, seed: list[int] = [0]) -> torch.Tensor:  # noqa: B006 - the counter
    seed[0] += 1
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 10_000 * seed[0]


def llama() -> dict[str, torch.Tensor]:
    width = HIDDEN // HEADS
    state = {"model.embed_tokens.weight": tagged(VOCAB, HIDDEN), "model.norm.weight": tagged(HIDDEN)}
    for i in range(2):
        layer = f"model.layers.{i}."
        state |= {
            f"{layer}input_layernorm.weight": tagged(HIDDEN),
            f"{layer}post_attention_layernorm.weight": tagged(HIDDEN),
            f"{layer}self_attn.q_proj.weight": tagged(HEADS * width, HIDDEN),
            f"{layer}self_attn.k_proj.weight": tagged(GROUPS * width, HIDDEN),
            f"{layer}self_attn.v_proj.weight": tagged(GROUPS * width, HIDDEN),
            f"{layer}self_attn.o_proj.weight": tagged(HIDDEN, HIDDEN),
            f"{layer}mlp.gate_proj.weight": tagged(FFN, HIDDEN),
            f"{layer}mlp.up_proj.weight": tagged(FFN, HIDDEN),
            f"{layer}mlp.down_proj.weight": tagged(HIDDEN, FFN),
        }
    return state


def mixtral() -> dict[str, torch.Tensor]:
    state = {name: tensor for name, tensor in llama().items() if ".mlp." not in name}
    for i in range(2):
        moe = f"model.layers.{i}.block_sparse_moe."
        state[f"{moe}gate.weight"] = tagged(4, HIDDEN)
        for e in range(4):
            state |= {f"{moe}experts.{e}.w{k}.weight": tagged(FFN, HIDDEN) for k in (1, 3)}
            state[f"{moe}experts.{e}.w2.weight"] = tagged(HIDDEN, FFN)
    return state


def gpt2() -> dict[str, torch.Tensor]:
    state = {"transformer.wte.weight": tagged(VOCAB, HIDDEN), "transformer.wpe.weight": tagged(16, HIDDEN)}
    shapes = {"attn.c_attn": (HIDDEN, 3 * HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN)}
    shapes |= {"mlp.c_fc": (HIDDEN, FFN), "mlp.c_proj": (FFN, HIDDEN)}
    for i in range(2):
        for name, shape in shapes.items():
            state[f"transformer.h.{i}.{name}.weight"] = tagged(*shape)
            state[f"transformer.h.{i}.{name}.bias"] = tagged(shape[1])
        for name in ("ln_1", "ln_2"):
            state |= {f"transformer.h.{i}.{name}.{kind}": tagged(HIDDEN) for kind in ("weight", "bias")}
    return state | {f"transformer.ln_f.{kind}": tagged(HIDDEN) for kind in ("weight", "bias")}


CONFIGS = {
    "llama": {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCAB},
    "mixtral": {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCAB},
    "gpt2": {"n_head": HEADS, "vocab_size": VOCAB},
}
STATES = {"llama": llama, "mixtral": mixtral, "gpt2": gpt2}


@pytest.fixture(params=STATES)
def model(request, tmp_path):
    """(name, state, folder) of a model; the head is tied to the embedding."""
    folder = tmp_path / "hf"
    folder.mkdir()
    state = STATES[request.param]()
    embed = next(name for name in state if "embed_tokens" in name or "wte" in name)
    save_file(state, folder / "model.safetensors", {"lm_head.weight": embed})
    (folder / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return request.param, state | {"lm_head.weight": state[embed]}, folder


def test_hugging_face_to_megatron_and_back_to_the_bit(model, tmp_path):
    name, state, folder = model
    convert(folder, tmp_path / "megatron", target_format="dcp", keymap=f"{name}:hf->megatron")
    convert(tmp_path / "megatron", tmp_path / "back", keymap=f"{name}:megatron->hf")
    found = open_foreign(tmp_path / "back").state_dict()
    assert set(found) == set(state)
    assert all(torch.equal(found[key], state[key]) for key in state)


def by_hand(q, k, v):
    width = HIDDEN // HEADS
    per_group = HEADS // GROUPS * width
    rows = []
    for g in range(GROUPS):
        rows += [q[g * per_group : (g + 1) * per_group], k[g * width : (g + 1) * width], v[g * width : (g + 1) * width]]
    return torch.cat(rows)


@pytest.fixture
def mapped(tmp_path):
    state = llama()
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    return state, MappedSnapshot(open_foreign(tmp_path), load_keymap("llama:hf->megatron"))


def test_qkv_are_grouped_and_gate_and_up_fused_as_megatron_has_them(mapped):
    state, snapshot = mapped
    layer = "model.layers.1."
    qkv = by_hand(*(state[f"{layer}self_attn.{c}_proj.weight"] for c in "qkv"))
    assert torch.equal(snapshot.read("decoder.layers.1.self_attention.linear_qkv.weight"), qkv)
    fc1 = torch.cat([state[f"{layer}mlp.gate_proj.weight"], state[f"{layer}mlp.up_proj.weight"]])
    assert torch.equal(snapshot.read("decoder.layers.1.mlp.linear_fc1.weight"), fc1)


@given(st.data())
def test_any_box_of_a_fused_tensor_is_that_of_the_whole(data):
    q, k, v = tagged(HEADS * 4, 5), tagged(GROUPS * 4, 5), tagged(GROUPS * 4, 5)
    whole = torch.cat(
        [torch.cat([q[g * 12 : g * 12 + 12], k[g * 4 : g * 4 + 4], v[g * 4 : g * 4 + 4]]) for g in (0, 1)]
    )
    offset = tuple(data.draw(st.integers(0, n)) for n in whole.shape)
    shape = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(whole.shape, offset, strict=True))
    box = Box(offset, shape)
    keymap = load_keymap("llama:hf->megatron", {"heads": HEADS, "kv_heads": GROUPS})
    names = [f"model.layers.0.self_attn.{c}_proj.weight" for c in "qkv"]
    snapshot = MappedSnapshot(Memory(dict(zip(names, (q, k, v), strict=True))), keymap)
    found = snapshot.read("decoder.layers.0.self_attention.linear_qkv.weight", box)
    assert torch.equal(found, whole[box.slices])


class Memory:
    """Tensors in memory under the interface of a snapshot."""

    url, files, notes, values, metadata = "memory", None, (), {}, {}

    def __init__(self, state):
        from vescale_ckpt.interop.foreign.snapshot import ForeignTensor  # noqa: PLC0415

        self.state = state
        self._tensors = {name: ForeignTensor(name, t.dtype, tuple(t.shape)) for name, t in state.items()}

    def tensors(self):
        return self._tensors

    def carried(self):
        return ()

    def read(self, name, box=None):
        return self.state[name][box.slices] if box is not None else self.state[name]


class TestPadding:
    def test_padding_of_the_vocabulary_never_gets_to_hugging_face(self, tmp_path):
        padded = torch.cat([tagged(VOCAB, HIDDEN), torch.full((65, HIDDEN), 7.0)])
        save_file({"embedding.word_embeddings.weight": padded}, tmp_path / "model.safetensors")
        keymap = load_keymap("llama:megatron->hf", {"vocab": VOCAB})
        found = MappedSnapshot(open_foreign(tmp_path), keymap)
        assert torch.equal(found.read("model.embed_tokens.weight"), padded[:VOCAB])

    def test_too_few_rows_are_refused(self, tmp_path):
        save_file({"embedding.word_embeddings.weight": tagged(60, HIDDEN)}, tmp_path / "model.safetensors")
        with pytest.raises(MismatchError, match="60 rows, vocab is 63"):
            MappedSnapshot(open_foreign(tmp_path), load_keymap("llama:megatron->hf", {"vocab": VOCAB}))


class TestMisfits:
    def fit(self, state, text, tmp_path):
        save_file(state, tmp_path / "x.safetensors")
        (tmp_path / "m.toml").write_text("version = 1\n" + text)
        return MappedSnapshot(open_foreign(tmp_path / "x.safetensors"), load_keymap(str(tmp_path / "m.toml")))

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ('[[rule]]\nfrom = "a"\nto = "x"', "no rule speaks of 'b'"),
            ('[[rule]]\nfrom = ["a", "c"]\nto = "x"\n[[rule]]\nfrom = "b"', "'c', which is not there"),
            ('[[rule]]\nfrom = ["a", "b"]\nto = "x"', "do not fit together"),
            ('[[rule]]\nfrom = "a"\nto = "x"\n[[rule]]\nfrom = "b"\nto = "x"', "two tensors would be named 'x'"),
            ('[[rule]]\nfrom = "a"\nto = ["x", "y", "z"]\n[[rule]]\nfrom = "b"', "not to be cut in 3"),
            ('[[rule]]\nfrom = "a"\nto = "x[0/2]"\n[[rule]]\nfrom = "b"', "not all"),
            ('[[rule]]\nfrom = ["a", "a", "a"]\nto = "x"\nlayout = "grouped_qkv"\n[[rule]]\nfrom = "b"', "heads"),
        ],
    )
    def test_all_of_it_is_told(self, tmp_path, text, match):
        with pytest.raises(MismatchError, match=match):
            self.fit({"a": torch.ones(4, 3), "b": torch.ones(5)}, text, tmp_path)

    def test_rest_may_be_kept_or_dropped_and_regular_expressions_rename(self, tmp_path):
        state = {"a.1.w": torch.ones(1), "a.2.w": torch.ones(2), "b": torch.ones(3)}
        rule = "[[rule]]\nfrom = 'a\\.(\\d)\\.w'\nto = 'c.\\1'\nregex = true\n"
        assert set(self.fit(state, 'unmatched = "keep"\n' + rule, tmp_path).tensors()) == {"c.1", "c.2", "b"}
        assert set(self.fit(state, 'unmatched = "drop"\n' + rule, tmp_path).tensors()) == {"c.1", "c.2"}

    def test_casts_round_as_torch_does_and_count_what_overflows(self, tmp_path):
        values = torch.tensor([1.0, 1e30, float("inf"), float("nan"), -70000.0, 1 + 2**-11])
        text = 'unmatched = "keep"\n[[cast]]\nmatch = ".*"\ndtype = "float16"\n'
        snapshot = self.fit({"w": values, "i": torch.arange(3)}, text.replace('".*"', '"w"'), tmp_path)
        assert torch.equal(snapshot.read("w").view(torch.int16), values.to(torch.float16).view(torch.int16))
        assert snapshot.take_overflows() == {"w": 2}
        assert snapshot.take_overflows() == {}
        assert snapshot.read("i").dtype is torch.int64
        assert snapshot.notes == ("w: cast from torch.float32 to torch.float16",)
