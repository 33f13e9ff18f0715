"""Llama's names and those close to them: most families keep them and add, fuse or rename a few."""

from typing import Final

from stoker_engine.models.families.fused import by_kv_head, rows
from stoker_engine.models.families.weight_names import Fused, WeightNames

LLAMA_NAMES: Final = {
    "embed": "model.embed_tokens",
    "layers.{i}.input_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj",
    "layers.{i}.k": "model.layers.{i}.self_attn.k_proj",
    "layers.{i}.v": "model.layers.{i}.self_attn.v_proj",
    "layers.{i}.o": "model.layers.{i}.self_attn.o_proj",
    "layers.{i}.pre_mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj",
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}

#: Normalised queries and keys.
QK_NORMS: Final = {
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm",
}

#: Buffers that older files carry.
IGNORED: Final = (r"\.rotary_emb\.inv_freq$", r"\.self_attn\.bias$")

QKV: Final = ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
GATE_UP: Final = ("layers.{i}.gate", "layers.{i}.up")

LLAMA: Final = WeightNames(names=LLAMA_NAMES, ignored=IGNORED)

QWEN3: Final = WeightNames(names=LLAMA_NAMES | QK_NORMS, ignored=IGNORED)

PHI3: Final = WeightNames(
    names=LLAMA_NAMES,
    fused={
        "model.layers.{i}.self_attn.qkv_proj": Fused(QKV, rows),
        "model.layers.{i}.mlp.gate_up_proj": Fused(GATE_UP, rows),
    },
    ignored=IGNORED,
)

QWEN1: Final = WeightNames(
    names={
        "embed": "transformer.wte",
        "layers.{i}.input_norm": "transformer.h.{i}.ln_1",
        "layers.{i}.o": "transformer.h.{i}.attn.c_proj",
        "layers.{i}.pre_mlp_norm": "transformer.h.{i}.ln_2",
        "layers.{i}.gate": "transformer.h.{i}.mlp.w2",
        "layers.{i}.up": "transformer.h.{i}.mlp.w1",
        "layers.{i}.down": "transformer.h.{i}.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    fused={"transformer.h.{i}.attn.c_attn": Fused(QKV, rows)},
    ignored=(r"\.rotary_emb\.inv_freq$", r"\.attn\.logn_tensor$"),
)

INTERNLM2: Final = WeightNames(
    names={
        "embed": "model.tok_embeddings",
        "layers.{i}.input_norm": "model.layers.{i}.attention_norm",
        "layers.{i}.o": "model.layers.{i}.attention.wo",
        "layers.{i}.pre_mlp_norm": "model.layers.{i}.ffn_norm",
        "layers.{i}.gate": "model.layers.{i}.feed_forward.w1",
        "layers.{i}.up": "model.layers.{i}.feed_forward.w3",
        "layers.{i}.down": "model.layers.{i}.feed_forward.w2",
        "final_norm": "model.norm",
        "lm_head": "output",
    },
    fused={"model.layers.{i}.attention.wqkv": Fused(QKV, by_kv_head)},
    ignored=(r"\.rotary_emb\.inv_freq$",),
)

#: Norms after each block instead of before.
OLMO2: Final = WeightNames(
    names={
        **{ours: theirs for ours, theirs in LLAMA_NAMES.items() if not ours.endswith(("input_norm", "pre_mlp_norm"))},
        **QK_NORMS,
        "layers.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
    },
    ignored=IGNORED,
)
