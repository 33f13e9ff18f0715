"""Adapters in the whole engine: in chunks, with preemption, prefix hits and several ranks, each request gets the
results of PEFT's unmerged model.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_engine import LLM, BeamSearchParams, LoRARequest, SamplingParams
from stoker_engine.architectures.model_config import ModelConfig, read_config

from ...support.engine.peft_adapters import PeftAdapters
from ...support.engine.tiny_configs import FAMILIES, VOCABULARY
from ...support.engine.tiny_models import prompts, tiny_family, tiny_mixture

#: The number of adapters, which exceeds the slots; and the adapter of each prompt, -1 for none.
NUM_ADAPTERS, CHOICES = 3, (0, -1, 2, 1, 0, 2)


class Served:
    """A model in a folder, with PEFT adapters."""

    def __init__(self, name: str, folder: Path, tokenizer: Path) -> None:
        theirs = tiny_family(name) if name in FAMILIES else tiny_mixture(name)
        theirs.save_pretrained(folder / "model")
        for file in tokenizer.glob("tokenizer*"):
            shutil.copy(file, folder / "model")
        self.model, self.peft = folder / "model", PeftAdapters(theirs)
        ranks = random.Random(name)
        self.folders = [
            self.peft.save_adapter(folder / "adapters", r=ranks.choice([1, 3, 8, 16]), lora_alpha=12)
            for _ in range(NUM_ADAPTERS)
        ]

    def llm(self, **options: Any) -> LLM:
        """Create an engine with one slot less than there are adapters."""
        given = {"max_loras": NUM_ADAPTERS - 1, "max_lora_rank": 64, "dtype": "float32", "device": "cpu", **options}
        return LLM(str(self.model), enable_lora=True, max_model_len=160, block_size=4, **given)

    def request(self, adapter: int) -> LoRARequest | None:
        """Return a prompt's request of an adapter; None for -1."""
        return None if adapter < 0 else LoRARequest(f"adapter {adapter}", adapter + 1, str(self.folders[adapter]))

    def check(self, adapter: int, prompt: list[int], tokens: list[int]) -> None:
        """Assert that each token is the likeliest one."""
        logits = self.peft.reference(adapter)(prompt + tokens)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() <= 1e-3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Any:
    made: dict[str, Served] = {}

    def get(name: str) -> Served:
        if name not in made:
            made[name] = Served(name, tmp_path_factory.mktemp("served"), tiny_llama)
        return made[name]

    return get


#: Prompts with shared prefixes, so that requests of one adapter could wrongly find another one's blocks.
def _prompts() -> list[list[int]]:
    one, two = prompts()[:2]
    return [one, one, one, two, [*one[:40], 7], [*one[:40], 7]]


#: Only in `make test-all`: `test_families.py` compares families and stages with PEFT, `test_row_spaces.py` without
#: adapters' files.
_LEFT_OUT = pytest.mark.slow(drawn=False)
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize(
    "name, options",
    [
        ("qwen3", {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 41}),
        ("qwen3", {"async_scheduling": True, "max_loras": 1}),
        ("qwen3", {"tensor_parallel_size": 2, "max_num_batched_tokens": 40}),
        pytest.param("qwen3", {"pipeline_parallel_size": 2}, marks=_LEFT_OUT),
        ("gemma3", {"num_gpu_blocks_override": 500}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        pytest.param("qwen3_moe", {"tensor_parallel_size": 2}, marks=_LEFT_OUT),
        pytest.param("deepseek_v3", {"tensor_parallel_size": 2}, marks=_LEFT_OUT),
        pytest.param("gpt_oss", {}, marks=_LEFT_OUT),
    ],
    ids=str,
)
def test_each_request_gets_its_adapter(served: Any, name: str, options: dict[str, Any]) -> None:
    of = served(name)
    llm = of.llm(**options)
    requests = [of.request(adapter) for adapter in CHOICES]
    for _ in range(2):  # with prefix hits the second time
        outputs = llm.generate(_prompts(), PARAMS, lora_request=requests, use_tqdm=False)
        for adapter, prompt, output in zip(CHOICES, _prompts(), outputs, strict=True):
            of.check(adapter, prompt, output.outputs[0].token_ids)
    config = ModelConfig.from_dict(read_config(of.model))
    if options.get("num_gpu_blocks_override") == 41:
        assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.scheduler.kv.hits > 0 or any(layer.sliding_window for layer in config.layers)


def test_logprobs_and_samples_use_the_adapter(served: Any) -> None:
    """Other outputs of a request also use its adapter."""
    of = served("qwen3")
    llm, prompt = of.llm(), prompts()[1]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=1, logprobs=4, prompt_logprobs=2)
    requests = [of.request(adapter) for adapter in (0, -1, 1)]
    outputs = llm.generate([prompt] * 3, greedy, lora_request=requests, use_tqdm=False)
    for adapter, output in zip((0, -1, 1), outputs, strict=True):
        tokens = output.outputs[0].token_ids
        expected = of.peft.reference(adapter)(prompt + tokens).log_softmax(-1)
        for index, logprobs in enumerate(output.outputs[0].logprobs):
            for token, logprob in logprobs.items():
                assert abs(logprob.logprob - expected[len(prompt) - 1 + index, token]) <= 1e-3
        for index, logprobs in enumerate(output.prompt_logprobs[1:]):
            for token, logprob in logprobs.items():
                assert abs(logprob.logprob - expected[index, token]) <= 1e-3
    drawn = SamplingParams(temperature=0.8, seed=3, max_tokens=8, n=3, ignore_eos=True)
    together = llm.generate([prompt] * 3, drawn, lora_request=requests, use_tqdm=False)
    for request, output in zip(requests, together, strict=True):
        [alone] = llm.generate([prompt], drawn, lora_request=request, use_tqdm=False)
        assert [each.token_ids for each in alone.outputs] == [each.token_ids for each in output.outputs]


def test_beams_use_the_adapter(served: Any) -> None:
    """The beams, of all adapters at once, have the scores of a beam search with PEFT's model."""
    of, width, length = served("qwen3"), 3, 6
    prompt = prompts()[1]
    adapters = (0, -1, 1)
    found = of.llm().beam_search(
        [prompt] * 3,
        BeamSearchParams(width, max_tokens=length, ignore_eos=True),
        lora_request=[of.request(adapter) for adapter in adapters],
    )
    best = []
    for adapter, output in zip(adapters, found, strict=True):
        logits = of.peft.reference(adapter)
        beams = [(0.0, prompt)]
        for _ in range(length):
            scores = torch.stack([score + logits(tokens)[-1].log_softmax(-1) for score, tokens in beams])
            chosen = scores.flatten().topk(width)
            beams = [
                (float(score), [*beams[int(at) // scores.shape[1]][1], int(at) % scores.shape[1]])
                for score, at in zip(chosen.values, chosen.indices, strict=True)
            ]
        assert [beam.cum_logprob for beam in output.sequences] == pytest.approx([score for score, _ in beams], abs=1e-3)
        assert output.sequences[0].tokens == beams[0][1]
        best.append(tuple(beams[0][1]))
    assert len(set(best)) == 3, "each adapter has other beams"


def test_adapters_work_on_a_quantized_base(served: Any) -> None:
    """Adapters are not quantized: their effect is the same, except for the rounding of the base model."""
    of = served("qwen2")
    llm = of.llm(quantization="int8")
    prompt = [5 + index % (VOCABULARY - 5) for index in range(40)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    found = []
    for adapter in (-1, 0, 1):
        [output] = llm.generate([prompt], params, lora_request=of.request(adapter), use_tqdm=False)
        expected = of.peft.reference(adapter)(prompt)[-1].log_softmax(-1)
        found.append({token: logprob.logprob for token, logprob in output.outputs[0].logprobs[0].items()})
        for token, logprob in found[-1].items():
            assert abs(logprob - expected[token]) <= 0.5
    assert found[0] != found[1] != found[2]
