"""How GGUF files spell weights: one vocabulary for all families (that of the ``gguf`` library's tensor name maps).

What llama.cpp's converter changes on the way is undone here: it turns the queries' and keys' rows of Llama's relatives
from half-split to neighbouring pairs, splits or joins matrices, and adds Gemma's offset to norm weights (which is
how we want them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.models.families.fused import each_row, rows
from stoker_engine.models.families.llama import GATE_UP, QKV
from stoker_engine.models.families.mixture import each_expert, latent_key_value, stacked
from stoker_engine.models.families.weight_names import Change, Fused, Make, MovesRows, Transposed, WeightNames

NAMES: Final = {
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

FUSED: Final = {
    "blk.{i}.attn_qkv": Fused(QKV, rows),
    "blk.{i}.attn_kv_b": Fused(("layers.{i}.k_b", "layers.{i}.v_b"), latent_key_value),
    "blk.{i}.ffn_gate_exps.weight": Fused(each_expert("gate"), stacked),
    "blk.{i}.ffn_up_exps.weight": Fused(each_expert("up"), stacked),
    "blk.{i}.ffn_down_exps.weight": Fused(each_expert("down"), stacked),
    "blk.{i}.ffn_gate_exps.bias": Fused(each_expert("gate", of="bias"), each_row),
    "blk.{i}.ffn_up_exps.bias": Fused(each_expert("up", of="bias"), each_row),
    "blk.{i}.ffn_down_exps.bias": Fused(each_expert("down", of="bias"), each_row),
}

#: Gate and up projection in one tensor (Phi-3, GLM-4).
FUSED_GATE_UP: Final = {"blk.{i}.ffn_up": Fused(GATE_UP, rows)}


def _each_head(norm: str, count: Callable[[ModelConfig], int]) -> Fused:
    def slots(config: ModelConfig) -> Sequence[str]:
        return [f"layers.{{i}}.{norm}.{head}.weight" for head in range(count(config))]

    return Fused(slots, each_row)


#: Norms with weights of each head's own (Command-R, StableLM).
FUSED_HEAD_NORMS: Final = {
    "blk.{i}.attn_q_norm.weight": _each_head("q_norm", lambda config: config.num_attention_heads),
    "blk.{i}.attn_k_norm.weight": _each_head("k_norm", lambda config: config.num_key_value_heads),
}

#: Read with the config (`models.gguf.gguf_families`), not as weights.
IGNORED: Final = (r"^rope_freqs\.weight$", r"^rope_factors_(long|short)\.weight$")


def _turned_back(count: Callable[[ModelConfig], int]) -> Make:
    """Rows of each head in pairs (0, 1), (2, 3) … → (0, d/2), (1, d/2 + 1) …"""

    @MovesRows
    def change(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
        return tensor.unflatten(0, (count(config), -1, 2)).transpose(1, 2).flatten(0, 2)  # type: ignore[no-any-return]

    return change


#: For families whose rotary pairs llama.cpp wants to be neighbours.
TURNED: Final = (
    Change(r"\.attn_q\.(weight|bias)$", _turned_back(lambda config: config.num_attention_heads)),
    Change(r"\.attn_k\.(weight|bias)$", _turned_back(lambda config: config.num_key_value_heads)),
)

#: Keys of latent attention are stored so that they multiply queries.
_LATENT_KEYS: Final = Change(r"\.attn_k_b\.weight$", Transposed(1, 2))

#: A gate over the shared experts is stored as a vector.
_SHARED_GATE: Final = Change(r"\.ffn_gate_inp_shexp\.weight$", lambda tensor, config: tensor.view(1, -1))


def spelling(
    names: dict[str, str] | None = None, fused: dict[str, Fused] | None = None, *, rotated: bool = False
) -> WeightNames:
    """A file's weight names: the vocabulary, with a family's exceptions."""
    own = {**NAMES, **(names or {})}
    return WeightNames(
        names={slot: name for slot, name in own.items() if name not in (fused or {})},
        fused={**FUSED, **(fused or {})},
        changes=(_LATENT_KEYS, _SHARED_GATE, *(TURNED if rotated else ())),
        ignored=IGNORED,
        layer=r"^blk\.(\d+)\.",
    )
