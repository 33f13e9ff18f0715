"""Which weight names go with which architecture. The names here are those of `architectures.families.registry`.

An architecture that is not here is no family of ours: it may run through `models.transformers_backend`.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.models.families.cohere import COHERE, GLM, STABLELM
from stoker_engine.models.families.gemma import GEMMA1, GEMMA2, GEMMA3
from stoker_engine.models.families.gpt import (
    BLOOM,
    FALCON,
    GPT2,
    GPT_NEOX,
    GPTJ,
    MPT,
    OPT,
    PHI,
    STARCODER2,
)
from stoker_engine.models.families.gpt_oss import GPT_OSS
from stoker_engine.models.families.llama import INTERNLM2, LLAMA, OLMO2, PHI3, QWEN1, QWEN3
from stoker_engine.models.families.mixture import (
    DBRX,
    DEEPSEEK,
    GLM4_MOE,
    GRANITE_MOE,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
)
from stoker_engine.models.families.weight_names import WeightNames

FAMILIES: Final[dict[str, WeightNames]] = {
    "BloomForCausalLM": BLOOM,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE,
    "DbrxForCausalLM": DBRX,
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "FalconForCausalLM": FALCON,
    "GPT2LMHeadModel": GPT2,
    "GPTJForCausalLM": GPTJ,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "GptOssForCausalLM": GPT_OSS,
    "GemmaForCausalLM": GEMMA1,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM,
    "GraniteForCausalLM": LLAMA,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "InternLM2ForCausalLM": INTERNLM2,
    "InternLM3ForCausalLM": LLAMA,
    "LLaMAForCausalLM": LLAMA,
    "LlamaForCausalLM": LLAMA,
    "MPTForCausalLM": MPT,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": MIXTRAL,
    "MptForCausalLM": MPT,
    "OPTForCausalLM": OPT,
    "OlmoForCausalLM": LLAMA,
    "Olmo2ForCausalLM": OLMO2,
    "OlmoeForCausalLM": QWEN3_MOE,
    "PhiForCausalLM": PHI,
    "Phi3ForCausalLM": PHI3,
    "QWenLMHeadModel": QWEN1,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "RWForCausalLM": FALCON,
    "StableLmForCausalLM": STABLELM,
    "Starcoder2ForCausalLM": STARCODER2,
}
