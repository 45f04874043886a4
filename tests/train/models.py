"""Small models of other people, as they are, with plans for them written by hand; nothing is downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from vescale_train.plan import Interleaved, Replicate, Shard

VOCAB, WIDTH, TIME, LAYERS, HEADS = 96, 32, 12, 2, 4


def llama(**changed):
    options = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 56,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**{**options, **changed}))


def gpt2(**changed):
    options = {
        "vocab_size": VOCAB,
        "n_positions": 32,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "loss_type": "ForCausalLM",
    }
    return GPT2LMHeadModel(GPT2Config(**{**options, **changed}))


def bert(**changed):
    options = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return BertForMaskedLM(BertConfig(**{**options, **changed}))


ROWS, COLUMNS, WHOLE = [Shard(0)], [Shard(1)], [Replicate()]

LLAMA_PLAN = {
    "parameter": {
        r"(model\.embed_tokens|lm_head)\.weight": ROWS,
        r"model\.layers\.\d+\.self_attn\.[qkv]_proj\.weight": ROWS,
        r"model\.layers\.\d+\.mlp\.(gate|up)_proj\.weight": ROWS,
        r"model\.layers\.\d+\.(self_attn\.o|mlp\.down)_proj\.weight": COLUMNS,
    },
    "forward": {
        r"model\.layers\.\d+\.mlp\.input": [WHOLE],
        r"model\.layers\.\d+\.self_attn\.input": {"hidden_states": WHOLE},
    },
}
LLAMA_SEQUENCE_PLAN = {
    "parameter": LLAMA_PLAN["parameter"],
    "forward": {
        r"model\.embed_tokens\.output": [COLUMNS],
        **LLAMA_PLAN["forward"],
        r"model\.layers\.\d+\.(mlp|self_attn)\.output": [COLUMNS],
        r"model\.norm\.output": [WHOLE],
    },
}
GPT2_PLAN = {
    "parameter": {
        r"transformer\.wte\.weight": ROWS,
        r"transformer\.h\.\d+\.attn\.c_attn\.weight": [Interleaved(1, 3)],
        r"transformer\.h\.\d+\.attn\.c_attn\.bias": [Interleaved(0, 3)],
        r"transformer\.h\.\d+\.mlp\.c_fc\.weight": COLUMNS,
        r"transformer\.h\.\d+\.mlp\.c_fc\.bias": ROWS,
        r"transformer\.h\.\d+\.(attn|mlp)\.c_proj\.weight": ROWS,
    },
}
BERT_PLAN = {
    "parameter": {
        r"bert\.embeddings\.word_embeddings\.weight": ROWS,
        r"cls\.predictions\.bias": ROWS,
        r"bert\.encoder\.layer\.\d+\.attention\.self\.(query|key|value)\.(weight|bias)": ROWS,
        r"bert\.encoder\.layer\.\d+\.intermediate\.dense\.(weight|bias)": ROWS,
        r"bert\.encoder\.layer\.\d+\.(attention\.)?output\.dense\.weight": COLUMNS,
    },
}

MAKERS = {"llama": llama, "gpt2": gpt2, "bert": bert}


def make(name, seed=0, **changed):
    torch.manual_seed(seed)
    return MAKERS[name](**changed)


def batch(seed=5, size=2, *, masked=False):
    """Return what all three take: tokens, labels of which some do not count, and a mask with padding if asked."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (size, TIME), generator=generator)
    labels = tokens.clone()
    labels[0, :3] = -100
    mask = None
    if masked:
        mask = torch.ones_like(tokens)
        mask[-1, 9:] = 0
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}
