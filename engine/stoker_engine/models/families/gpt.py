"""The names of GPT-2 and those after its design, BLOOM and Falcon included."""

from typing import Final

from stoker_engine.models.families.fused import by_kv_head, rows, transposed
from stoker_engine.models.families.llama import IGNORED, LLAMA_NAMES, QKV
from stoker_engine.models.families.weight_names import Change, Fused, WeightNames

_IGNORED: Final = (r"\.attn\.(bias|masked_bias)$", r"\.attention\.(bias|masked_bias)$", r"\.rotary_emb\.inv_freq$")

GPT2: Final = WeightNames(
    names={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.{i}.input_norm": "transformer.h.{i}.ln_1",
        "layers.{i}.o": "transformer.h.{i}.attn.c_proj",
        "layers.{i}.pre_mlp_norm": "transformer.h.{i}.ln_2",
        "layers.{i}.up": "transformer.h.{i}.mlp.c_fc",
        "layers.{i}.down": "transformer.h.{i}.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    fused={"transformer.h.{i}.attn.c_attn": Fused(QKV, rows)},
    renames=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
    changes=(Change(r"\.(c_attn|c_proj|c_fc)\.weight$", transposed),),
    ignored=_IGNORED,
)

GPTJ: Final = WeightNames(
    names={
        "embed": "transformer.wte",
        "layers.{i}.input_norm": "transformer.h.{i}.ln_1",
        "layers.{i}.q": "transformer.h.{i}.attn.q_proj",
        "layers.{i}.k": "transformer.h.{i}.attn.k_proj",
        "layers.{i}.v": "transformer.h.{i}.attn.v_proj",
        "layers.{i}.o": "transformer.h.{i}.attn.out_proj",
        "layers.{i}.up": "transformer.h.{i}.mlp.fc_in",
        "layers.{i}.down": "transformer.h.{i}.mlp.fc_out",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    ignored=(*_IGNORED, r"\.attn\.embed_positions$"),
)

GPT_NEOX: Final = WeightNames(
    names={
        "embed": "gpt_neox.embed_in",
        "layers.{i}.input_norm": "gpt_neox.layers.{i}.input_layernorm",
        "layers.{i}.o": "gpt_neox.layers.{i}.attention.dense",
        "layers.{i}.pre_mlp_norm": "gpt_neox.layers.{i}.post_attention_layernorm",
        "layers.{i}.up": "gpt_neox.layers.{i}.mlp.dense_h_to_4h",
        "layers.{i}.down": "gpt_neox.layers.{i}.mlp.dense_4h_to_h",
        "final_norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    },
    fused={"gpt_neox.layers.{i}.attention.query_key_value": Fused(QKV, by_kv_head)},
    ignored=_IGNORED,
)

PHI: Final = WeightNames(
    names={
        "embed": "model.embed_tokens",
        "layers.{i}.input_norm": "model.layers.{i}.input_layernorm",
        "layers.{i}.q": "model.layers.{i}.self_attn.q_proj",
        "layers.{i}.k": "model.layers.{i}.self_attn.k_proj",
        "layers.{i}.v": "model.layers.{i}.self_attn.v_proj",
        "layers.{i}.o": "model.layers.{i}.self_attn.dense",
        "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_layernorm",
        "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_layernorm",
        "layers.{i}.up": "model.layers.{i}.mlp.fc1",
        "layers.{i}.down": "model.layers.{i}.mlp.fc2",
        "final_norm": "model.final_layernorm",
        "lm_head": "lm_head",
    },
    ignored=IGNORED,
)

OPT: Final = WeightNames(
    names={
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "layers.{i}.input_norm": "model.decoder.layers.{i}.self_attn_layer_norm",
        "layers.{i}.post_attention_norm": "model.decoder.layers.{i}.self_attn_layer_norm",  # of OPT-350m
        "layers.{i}.q": "model.decoder.layers.{i}.self_attn.q_proj",
        "layers.{i}.k": "model.decoder.layers.{i}.self_attn.k_proj",
        "layers.{i}.v": "model.decoder.layers.{i}.self_attn.v_proj",
        "layers.{i}.o": "model.decoder.layers.{i}.self_attn.out_proj",
        "layers.{i}.pre_mlp_norm": "model.decoder.layers.{i}.final_layer_norm",
        "layers.{i}.post_mlp_norm": "model.decoder.layers.{i}.final_layer_norm",
        "layers.{i}.up": "model.decoder.layers.{i}.fc1",
        "layers.{i}.down": "model.decoder.layers.{i}.fc2",
        "final_norm": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
    },
    renames=((r"^decoder\.", "model.decoder."),),
    ignored=(r"\.decoder\.version$",),
)

STARCODER2: Final = WeightNames(
    names={
        **LLAMA_NAMES,
        "layers.{i}.up": "model.layers.{i}.mlp.c_fc",
        "layers.{i}.down": "model.layers.{i}.mlp.c_proj",
    },
    ignored=IGNORED,
)

BLOOM: Final = WeightNames(
    names={
        "embed": "transformer.word_embeddings",
        "embed_norm": "transformer.word_embeddings_layernorm",
        "layers.{i}.input_norm": "transformer.h.{i}.input_layernorm",
        "layers.{i}.o": "transformer.h.{i}.self_attention.dense",
        "layers.{i}.pre_mlp_norm": "transformer.h.{i}.post_attention_layernorm",
        "layers.{i}.up": "transformer.h.{i}.mlp.dense_h_to_4h",
        "layers.{i}.down": "transformer.h.{i}.mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    fused={"transformer.h.{i}.self_attention.query_key_value": Fused(QKV, by_kv_head)},
    renames=((r"^(word_embeddings|word_embeddings_layernorm|h|ln_f)\.", r"transformer.\1."),),
)

MPT: Final = WeightNames(
    names={
        "embed": "transformer.wte",
        "layers.{i}.input_norm": "transformer.blocks.{i}.norm_1",
        "layers.{i}.o": "transformer.blocks.{i}.attn.out_proj",
        "layers.{i}.pre_mlp_norm": "transformer.blocks.{i}.norm_2",
        "layers.{i}.up": "transformer.blocks.{i}.ffn.up_proj",
        "layers.{i}.down": "transformer.blocks.{i}.ffn.down_proj",
        "final_norm": "transformer.norm_f",
        "lm_head": "lm_head",
    },
    fused={"transformer.blocks.{i}.attn.Wqkv": Fused(QKV, rows)},
)

FALCON: Final = WeightNames(
    names={
        "embed": "transformer.word_embeddings",
        "layers.{i}.input_norm": "transformer.h.{i}.input_layernorm",
        "layers.{i}.o": "transformer.h.{i}.self_attention.dense",
        "layers.{i}.pre_mlp_norm": "transformer.h.{i}.post_attention_layernorm",
        "layers.{i}.up": "transformer.h.{i}.mlp.dense_h_to_4h",
        "layers.{i}.down": "transformer.h.{i}.mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    # Old files have one key and value head for all queries: the same order, with one group.
    fused={"transformer.h.{i}.self_attention.query_key_value": Fused(QKV, by_kv_head)},
    renames=((r"\.ln_attn\.", ".input_layernorm."), (r"\.ln_mlp\.", ".post_attention_layernorm.")),
    ignored=(r"\.rotary_emb\.inv_freq$", r"\.maybe_rotary\.inv_freq$"),
)
