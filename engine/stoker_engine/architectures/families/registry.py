"""Family of each architecture, by the names in config.json's ``architectures``. Another name of a family's architecture
needs only a line here.

Other architectures may run on the Transformers backend (`models.transformers_backend`).
"""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.families.bloom import BLOOM
from stoker_engine.architectures.families.cohere import COHERE, COHERE2
from stoker_engine.architectures.families.dbrx import DBRX
from stoker_engine.architectures.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from stoker_engine.architectures.families.falcon import FALCON
from stoker_engine.architectures.families.family import Family
from stoker_engine.architectures.families.gemma import GEMMA1, GEMMA2, GEMMA3
from stoker_engine.architectures.families.glm import GLM, GLM4, GLM4_MOE
from stoker_engine.architectures.families.gpt import GPT2, GPT_NEOX, GPTJ
from stoker_engine.architectures.families.gpt_oss import GPT_OSS
from stoker_engine.architectures.families.granite import GRANITE, GRANITE_MOE
from stoker_engine.architectures.families.internlm import INTERNLM2, INTERNLM3
from stoker_engine.architectures.families.llama import LLAMA
from stoker_engine.architectures.families.mistral import MISTRAL, MIXTRAL
from stoker_engine.architectures.families.mpt import MPT
from stoker_engine.architectures.families.olmo import OLMO, OLMO2, OLMOE
from stoker_engine.architectures.families.opt import OPT
from stoker_engine.architectures.families.phi import PHI, PHI3
from stoker_engine.architectures.families.qwen import QWEN1, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from stoker_engine.architectures.families.stablelm import STABLELM
from stoker_engine.architectures.families.starcoder2 import STARCODER2

FAMILIES: Final[dict[str, Family]] = {
    "BloomForCausalLM": BLOOM,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE2,
    "DbrxForCausalLM": DBRX,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
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
    "Glm4ForCausalLM": GLM4,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "InternLM2ForCausalLM": INTERNLM2,
    "InternLM3ForCausalLM": INTERNLM3,
    "LLaMAForCausalLM": LLAMA,
    "LlamaForCausalLM": LLAMA,
    "MPTForCausalLM": MPT,
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MIXTRAL,
    "MptForCausalLM": MPT,
    "OPTForCausalLM": OPT,
    "OlmoForCausalLM": OLMO,
    "Olmo2ForCausalLM": OLMO2,
    "OlmoeForCausalLM": OLMOE,
    "PhiForCausalLM": PHI,
    "Phi3ForCausalLM": PHI3,
    "QWenLMHeadModel": QWEN1,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "RWForCausalLM": FALCON,
    "StableLmForCausalLM": STABLELM,
    "Starcoder2ForCausalLM": STARCODER2,
}
