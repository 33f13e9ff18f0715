"""Converts the typed fields of a spec into engine arguments, with vLLM's names, which Stoker shares."""

from __future__ import annotations

from typing import Any, Final

from stoker_common.model_source import ModelSource
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.planner import Plan

#: Engine argument → the field of the spec that sets it.
FIELDS: Final = {
    "model": "spec.model.source",
    "served_model_name": "spec.model.servedNames",
    "revision": "spec.model.revision",
    "trust_remote_code": "spec.model.trustRemoteCode",
    "chat_template": "spec.model.chatTemplate",
    "device": "spec.hardware.accelerator",
    "tensor_parallel_size": "spec.parallelism.tensor",
    "data_parallel_size": "spec.parallelism.data",
    "pipeline_parallel_size": "spec.parallelism.pipeline",
    "enable_expert_parallel": "spec.parallelism.expert",
    "dtype": "spec.engine.dtype",
    "quantization": "spec.engine.quantization",
    "kv_cache_dtype": "spec.engine.kvCacheDtype",
    "max_num_seqs": "spec.engine.maxNumSeqs",
    "max_num_batched_tokens": "spec.engine.maxNumBatchedTokens",
    "max_model_len": "spec.engine.maxModelLen",
    "gpu_memory_utilization": "spec.engine.gpuMemoryUtilizationPercent",
    "enable_prefix_caching": "spec.engine.enablePrefixCaching",
    "api_key_file": "spec.auth.apiKeysSecretRef",
    "shutdown_timeout": "spec.rollout.drainSeconds",
}


def decided_arguments(spec: Spec, plan: Plan, chat_template: str | None) -> dict[str, Any]:
    """Return the arguments that a field, the plan or a field's default decides for every runtime, by name.

    The values have the types of Stoker's `EngineArgs` and `FrontendArgs`.
    """
    source = ModelSource.parse(spec.model.source)
    engine, placement = spec.engine, plan.placement
    optional: dict[str, Any] = {
        "revision": spec.model.revision,
        "chat_template": chat_template,
        "dtype": engine.dtype,
        "quantization": engine.quantization,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": plan.max_model_len or engine.max_model_len,
        "enable_prefix_caching": engine.enable_prefix_caching,
    }
    return {
        "model": source.model_argument,
        "served_model_name": tuple(spec.model.served_names or [source.served_name]),
        **{name: value for name, value in optional.items() if value is not None},
        # Always decided, so that ``spec.engine.args`` cannot change what the plan relies on, or enable remote code.
        "trust_remote_code": bool(spec.model.trust_remote_code),
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "kv_cache_dtype": engine.kv_cache_dtype or "auto",
        "tensor_parallel_size": placement.tensor,
        "pipeline_parallel_size": placement.pipeline,
        "data_parallel_size": placement.data,
        "enable_expert_parallel": placement.expert,
    }
