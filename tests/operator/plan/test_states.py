"""Plans of models with recurrent layers, which keep one state per sequence of any length."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from stoker_engine.architectures.cache_spec import LayerCache, StateSpec, StateTensor
from stoker_engine.architectures.decoder_config import LayerConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import GIB, Device, Numbers, memory_use
from stoker_engine.sizing.weight_sizes import ONE_DEVICE
from stoker_operator.plan.engine_settings import EngineSettings
from stoker_operator.plan.estimate import Bench, estimate, needed_bytes
from stoker_operator.plan.model_shapes import Shape

STATE = StateSpec((StateTensor("conv", (3, 512)), StateTensor("ssm", (512, 16), "float32")))
STATE_BYTES = 3 * 512 * 2 + 512 * 16 * 4
NUMBERS = Numbers(2, kv_format("auto", "bfloat16"), 16, 2048, 256)
SETTINGS = EngineSettings(0.9, 256, 2048, 16)


@dataclass(frozen=True)
class Recurrent(LayerConfig):
    """A layer with a state instead of keys and values."""

    @property
    def cache(self) -> LayerCache:
        """Its state."""
        return STATE


def bench(every: int) -> Bench:
    """Eight layers, of which every `every`-th has attention and the others a state; 0: all have a state."""
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "vocab_size": 1000,
            "max_position_embeddings": 8192,
        }
    )
    layers: list[LayerConfig] = []
    for index, layer in enumerate(config.layers):
        attention = replace(layer.attention)
        is_attention = every and index % every == 0
        layers.append(replace(layer, attention=attention) if is_attention else Recurrent(attention, layer.mlp))
    config = replace(config, decoder=replace(config.decoder, layers=tuple(layers)))
    return Bench(Shape(config), NUMBERS, SETTINGS, 8 * GIB, on_cpu=False, margin=0)


@pytest.mark.parametrize(("every", "block", "blocks_of_states"), [(0, STATE_BYTES, 8), (4, 2 * 2 * 512 * 2 * 16, 4)])
def test_concurrency_counts_whole_sequences(every: int, block: int, blocks_of_states: int) -> None:
    if every:  # states of six layers, in blocks of 16 tokens of two attention layers
        assert blocks_of_states == -(-6 * STATE_BYTES // block)
    found, problem = estimate(bench(every), ONE_DEVICE)
    use = memory_use(bench(every).shape.config, NUMBERS, Device(8 * GIB, 0.9, on_cpu=False))
    assert problem is None and found.max_model_len == 8192
    assert found.kv_blocks == use.num_blocks == use.kv_cache // block
    of_tokens = 8192 // 16 if every else 0
    at_once = (use.num_blocks - 1) // (blocks_of_states + of_tokens)
    assert found.max_concurrency == at_once > 1
    assert found.kv_tokens_per_copy == (use.num_blocks - 1) * 8192 // (blocks_of_states + of_tokens)


@pytest.mark.parametrize("every", [0, 4])
def test_needed_bytes_suffice_and_are_hardly_more(every: int) -> None:
    needed = needed_bytes(bench(every))
    for memory, fits in ((needed + 1, True), (int(needed * 0.98), False)):
        sized = replace(bench(every), memory_bytes=memory)
        found, _ = estimate(sized, ONE_DEVICE)
        assert (found.max_model_len is not None and found.max_model_len >= 2048) == fits
