"""Llama 1–3.3: pre-norm, SiLU-gated MLP, rotary positions, grouped KV heads."""

from stoker_engine.models.family import Family, WeightNames

LLAMA_NAMES = {
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

LLAMA = Family(
    safetensors=WeightNames(names=LLAMA_NAMES, ignored=(r"\.rotary_emb\.inv_freq$", r"\.self_attn\.bias$")),
)
