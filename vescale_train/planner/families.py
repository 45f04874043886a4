"""What is known of model families by name: which layers make parts, which take them together again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The layers of one kind of transformer, by the last parts of their names."""

    columns: tuple[str, ...]
    """Layers whose outputs are shared out: projections into heads, up projections."""
    rows: tuple[str, ...]
    """Layers that take such parts and sum over ranks."""
    fused: Mapping[str, int] = field(default_factory=dict)
    """Layers of ``columns`` that make equal things side by side, such as queries, keys and values -> how many."""
    keys: tuple[str, ...] = ()
    """Layers of ``columns`` that make keys or values, of which there may be fewer heads."""
    attention: tuple[str, ...] = ()
    """Layers of the other tuples that only make sense if heads can be shared out."""
    entry: str = ""
    """The module whose output begins the residual stream; empty if the parts of a sequence are not offered."""
    exit: str = ""
    """The module whose output ends it."""


_LLAMA = Family(
    columns=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    rows=("o_proj", "down_proj"),
    keys=("k_proj", "v_proj"),
    attention=("q_proj", "k_proj", "v_proj", "o_proj"),
    entry="embed_tokens",
    exit="model.norm",
)
_GPT2 = Family(
    columns=("c_attn", "c_fc"),
    rows=("attn.c_proj", "mlp.c_proj"),
    fused={"c_attn": 3},
    attention=("c_attn", "attn.c_proj"),
    entry="drop",
    exit="ln_f",
)
_BERT = Family(
    columns=("self.query", "self.key", "self.value", "intermediate.dense"),
    rows=("attention.output.dense", "output.dense"),
    attention=("self.query", "self.key", "self.value", "attention.output.dense"),
    entry="embeddings",
    exit="encoder",
)
_NEOX = Family(
    columns=("query_key_value", "dense_h_to_4h"),
    rows=("attention.dense", "self_attention.dense", "dense_4h_to_h"),
    attention=("query_key_value", "attention.dense", "self_attention.dense"),
)
_OPT = Family(
    columns=("q_proj", "k_proj", "v_proj", "fc1"),
    rows=("out_proj", "fc2"),
    attention=("q_proj", "k_proj", "v_proj", "out_proj"),
)
_T5 = Family(
    columns=(
        "SelfAttention.q",
        "SelfAttention.k",
        "SelfAttention.v",
        "EncDecAttention.q",
        "EncDecAttention.k",
        "EncDecAttention.v",
        "wi",
        "wi_0",
        "wi_1",
    ),
    rows=("SelfAttention.o", "EncDecAttention.o", "wo"),
    attention=("q", "k", "v", "o"),
)

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "olmo", "smollm3", "granite"), _LLAMA),
    "gpt2": _GPT2,
    **dict.fromkeys(("bert", "roberta", "electra", "xlm-roberta"), _BERT),
    **dict.fromkeys(("gpt_neox", "bloom"), _NEOX),
    "opt": _OPT,
    "t5": _T5,
}
"""Hugging Face's ``config.model_type`` -> family."""
