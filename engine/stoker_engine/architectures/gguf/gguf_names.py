"""Names of weights in GGUF files: those of the ``gguf`` library's tensor name maps.

Two changes of llama.cpp's converter are reverted: for Llama and related families it reorders the rows of queries and
keys from half-split to adjacent pairs, and it splits or concatenates matrices. Its addition of 1 to Gemma's norm
weights is not reverted, because Stoker's parameters include the 1.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.families.family import GGUFFamily
from stoker_engine.architectures.families.shared_weight_names import QKV, expert_stack
from stoker_engine.architectures.gguf.gguf_metadata import Metadata
from stoker_engine.architectures.weight_layout import Fused, HalfSplitPairs, Operation, Split, ToRow, Transpose
from stoker_engine.architectures.weight_names import WeightNames

_NAMES: Final = {
    "embed": "token_embd",
    "embed_norm": "token_embd_norm",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "layers.{i}.input_norm": "blk.{i}.attn_norm",
    "layers.{i}.q": "blk.{i}.attn_q",
    "layers.{i}.k": "blk.{i}.attn_k",
    "layers.{i}.v": "blk.{i}.attn_v",
    "layers.{i}.o": "blk.{i}.attn_output",
    "layers.{i}.q_norm": "blk.{i}.attn_q_norm",
    "layers.{i}.k_norm": "blk.{i}.attn_k_norm",
    "layers.{i}.sinks": "blk.{i}.attn_sinks.weight",
    "layers.{i}.post_attention_norm": "blk.{i}.post_attention_norm",
    "layers.{i}.pre_mlp_norm": "blk.{i}.ffn_norm",
    "layers.{i}.gate": "blk.{i}.ffn_gate",
    "layers.{i}.up": "blk.{i}.ffn_up",
    "layers.{i}.down": "blk.{i}.ffn_down",
    "layers.{i}.post_mlp_norm": "blk.{i}.post_ffw_norm",
    "layers.{i}.router": "blk.{i}.ffn_gate_inp",
    "layers.{i}.router.correction_bias": "blk.{i}.exp_probs_b.bias",
    "layers.{i}.shared.gate": "blk.{i}.ffn_gate_shexp",
    "layers.{i}.shared.up": "blk.{i}.ffn_up_shexp",
    "layers.{i}.shared.down": "blk.{i}.ffn_down_shexp",
    "layers.{i}.shared_gate": "blk.{i}.ffn_gate_inp_shexp",
    "layers.{i}.q_a": "blk.{i}.attn_q_a",
    "layers.{i}.q_a_norm": "blk.{i}.attn_q_a_norm",
    "layers.{i}.q_b": "blk.{i}.attn_q_b",
    "layers.{i}.kv_a": "blk.{i}.attn_kv_a_mqa",
    "layers.{i}.kv_a_norm": "blk.{i}.attn_kv_a_norm",
    "layers.{i}.k_b": "blk.{i}.attn_k_b",
    "layers.{i}.v_b": "blk.{i}.attn_v_b",
}

_FUSED: Final = {
    "blk.{i}.attn_qkv": Fused(QKV, Split.ROWS),
    "blk.{i}.attn_kv_b": Fused(("layers.{i}.k_b", "layers.{i}.v_b"), Split.LATENT_HEADS),
    **{f"blk.{{i}}.ffn_{part}_exps.weight": expert_stack(part) for part in ("gate", "up", "down")},
    **{
        f"blk.{{i}}.ffn_{part}_exps.bias": expert_stack(part, split=Split.EACH_ROW, of="bias")
        for part in ("gate", "up", "down")
    },
}

#: Tensors that belong to the config.
_IGNORED: Final = (r"^rope_freqs\.weight$", r"^rope_factors_(long|short)\.weight$")

_OPERATIONS: Final[dict[str, Operation]] = {
    r"\.attn_k_b\.weight$": Transpose(1, 2),  # latent attention's key matrices are stored transposed, for absorption
    r"\.ffn_gate_inp_shexp\.weight$": ToRow(),  # a gate over the shared experts is stored as a vector
}

#: Operations for families whose rotary pairs are adjacent in llama.cpp.
_ROTATED: Final[dict[str, Operation]] = {
    r"\.attn_q\.(weight|bias)$": HalfSplitPairs("num_attention_heads"),
    r"\.attn_k\.(weight|bias)$": HalfSplitPairs("num_key_value_heads"),
}


def gguf_weight_names(family: GGUFFamily, metadata: Metadata) -> WeightNames:
    """Return the weight names of a file: the common names with its family's exceptions."""
    names = {**_NAMES, **family.names(metadata)}
    return WeightNames(
        names={ours: theirs for ours, theirs in names.items() if theirs not in family.fused},
        fused={**_FUSED, **family.fused},
        operations=_OPERATIONS | (_ROTATED if family.rotated else {}),
        ignored=_IGNORED,
        layer=r"^blk\.(\d+)\.",
    )
