"""Other engines with nano-vllm's benchmark, where they are installed: vLLM, SGLang, transformers."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_parts.context import Context
from gpu_parts.figures import Figure
from gpu_parts.models import SHAPES
from gpu_parts.requests import Request, below, nano_vllm

#: Generates all requests, and returns the number of tokens of each.
Generate = Callable[[list[Request]], list[int]]

_LONGEST = 4096


def vllm(folder: Path, device: str) -> Generate:
    """Return vLLM's generation; its limits of a step are its defaults for the device."""
    module: Any = importlib.import_module("vllm")
    llm = module.LLM(str(folder), dtype="bfloat16", max_model_len=_LONGEST, enable_prefix_caching=False)

    def generate(requests: list[Request]) -> list[int]:
        params = [module.SamplingParams(temperature=0.6, max_tokens=out, ignore_eos=True) for _, out in requests]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


def sglang(folder: Path, device: str) -> Generate:
    """Return SGLang's generation."""
    module: Any = importlib.import_module("sglang")
    engine = module.Engine(
        model_path=str(folder), dtype="bfloat16", context_length=_LONGEST, disable_radix_cache=True,
        skip_tokenizer_init=True,
    )  # fmt: skip

    def generate(requests: list[Request]) -> list[int]:
        params = [{"temperature": 0.6, "max_new_tokens": out, "ignore_eos": True} for _, out in requests]
        outputs = engine.generate(input_ids=[prompt for prompt, _ in requests], sampling_params=params)
        return [output["meta_info"]["completion_tokens"] for output in outputs]

    return generate


def transformers(folder: Path, device: str) -> Generate:
    """Return transformers' continuous batching, greedy. All outputs of a call have the same maximum length, so requests
    are cut to their mean."""
    torch: Any = importlib.import_module("torch")
    module: Any = importlib.import_module("transformers")
    attention = "sdpa" if device == "cpu" else "paged|sdpa"
    model = module.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=device, attn_implementation=attention
    ).eval()

    def generate(requests: list[Request]) -> list[int]:
        mean = sum(out for _, out in requests) // len(requests)
        config = module.GenerationConfig(max_new_tokens=mean, do_sample=False, eos_token_id=-1, pad_token_id=0)
        results = model.generate_batch(
            inputs=[prompt for prompt, _ in requests], generation_config=config, progress_bar=False
        )
        return [len(result.generated_tokens) for result in results.values()]

    return generate


PEERS: dict[str, Callable[[Path, str], Generate]] = {"vllm": vllm, "sglang": sglang, "transformers": transformers}


def is_installed(peer: str) -> bool:
    """Whether a peer's package is installed."""
    return importlib.util.find_spec(peer) is not None


def measure(context: Context, peer: str) -> None:
    """Record a peer's throughput, as a figure of its own."""
    scale, name = context.scale, context.scale.small
    requests = below(nano_vllm(*scale.nano), SHAPES[name].vocab_size)
    generate = PEERS[peer](context.model(name), scale.device)
    generate([(prompt[:8], 4) for prompt, _ in requests[:2]])
    began = time.perf_counter()
    counts = generate(requests)
    took = time.perf_counter() - began
    version = importlib.import_module(peer).__version__
    settings = f"{len(requests)} requests, {sum(counts):,} tokens out; {peer} {version} with its defaults"
    title = f"{name}, nano-vllm's benchmark by {peer}, output"
    context.add(Figure(f"nano-vllm/{name}/bf16/{peer}", title, sum(counts) / took, "tok/s", settings))
