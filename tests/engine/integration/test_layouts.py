"""A model shared by ranks gives the results of one process, in any layout.

Other tests compare the single process with transformers. Random combinations of family × layout × options × requests
are tested; each seed is one case.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_engine import SamplingParams
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.engine import Engine
from stoker_engine.exec.runner import Runner
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.sizing.weight_sizes import stage_weight_bytes
from stoker_engine.tokens.tokenizer import Tokenizer

from ...support.engine.repeating_proposer import RepeatingProposer
from ...support.engine.thread_ranks import ThreadExecutor, ThreadRanks, thread_engine
from ...support.engine.tiny_models import save_model, tiny_gguf, tiny_llama_model
from ..exec.test_rank_executor import NEAR, TIGHT, Outputs, _check_alike, _requests, _run
from ..models import llama_cpp
from ..models.quantized_folders import FORMATS, folder
from ..models.test_gpt_oss import _save as save_gpt_oss
from ..models.test_gpt_oss import unquantized as unquantized_gpt_oss
from ..models.test_tensor_parallel import CASES, MODELS, save
from .test_structured_outputs import SMALL, constraints
from .test_structured_outputs import requests as requests_with_grammars
from .test_structured_outputs import run as run_with_grammars

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "TP 3": {"tensor_parallel_size": 3},
    "TP 4": {"tensor_parallel_size": 4},
    "EP 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "EP 3": {"tensor_parallel_size": 3, "enable_expert_parallel": True},
    "EP 4": {"tensor_parallel_size": 4, "enable_expert_parallel": True},
    "PP 2": {"pipeline_parallel_size": 2},
    "PP 3": {"pipeline_parallel_size": 3},
    "TP 2 PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "EP 2 PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
}
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
#: One case per kind of layer; the others are selected randomly.
FAST = [
    ("llama 1 KV head", "TP 4", 0),
    ("gemma3", "TP 2", 1),
    ("bloom", "TP 3", 2),
    ("qwen2_moe", "EP 2", 3),
    ("gpt_oss", "EP 4", 4),
    ("deepseek_v3", "TP 2", 5),
    ("qwen2_moe", "EP 2 PP 2", 6),
]
#: ALiBi slopes per head, KV heads replicated on all ranks, and weights ordered by head in the files.
BY_HEADS = [
    ("mpt clip", "TP 2", 9),
    ("mpt", "TP 2 PP 2", 10),
    ("falcon 7b", "TP 4", 11),
    ("falcon 40b", "TP 4", 12),
    ("falcon 11b", "TP 2 PP 2", 13),
]
#: Quantized matrices with several tensors, which stages without them must not miss.
QUANTIZED_FAST = [("gptq", "PP 2"), ("int-quantized", "TP 2 PP 2"), ("pack-quantized order", "PP 2")]


def _drawn(count: int) -> list[tuple[str, str, int]]:
    cases = random.Random(14).sample(CASES, count)
    return [(name, f"{'EP' if whole else 'TP'} {size}", 100 + seed) for seed, (name, size, whole) in enumerate(cases)]


def _drawn_in_stages() -> list[tuple[str, str, int]]:
    """Return every model in stages, alone or with tensor parallelism."""
    chance = random.Random(15)
    cases = []
    for seed, name in enumerate(MODELS):
        sharing = [f"{'EP' if whole else 'TP'} 2 PP 2" for other, size, whole in CASES if (other, size) == (name, 2)]
        cases.append((name, chance.choice(["PP 2", *sharing]), 200 + seed))
    return cases


def _mixed(seed: int, vocabulary: int, every: int = 2) -> list[EngineRequest]:
    """Return all kinds of requests, some of which only need the likeliest tokens."""
    chance = random.Random(seed)
    requests = []
    for request in _requests(seed)[::every]:
        prompt = [token % vocabulary for token in request.prompt_token_ids]
        params = GREEDY if chance.random() < 0.4 else request.params
        requests.append(replace(request, prompt_token_ids=prompt, params=params))
    return requests


def _check_memory(executor: ThreadExecutor, args: EngineArgs) -> None:
    """Assert that each rank has allocated the planned memory, to the byte."""
    checkpoint, layout = find_checkpoint(args), RankLayout.of(args)
    formats = checkpoint.weight_formats(torch.float32, torch.device("cpu"))
    for rank, runner in enumerate(executor.runners):
        stage, tp_rank = layout.stage_of(rank).index, layout.place_of(rank)
        planned = stage_weight_bytes(checkpoint.config, stage, 4, layout.sharding, formats=formats, rank=tp_rank)
        assert sum(target.tensor.nbytes for target in _weight_targets(runner).values()) == planned


def _weight_targets(runner: Runner) -> dict[str, Any]:
    assert isinstance(runner.model, Decoder)
    return runner.model.weight_targets()


def _compare(model: Path, layout: str, seed: int, **engine_options: Any) -> None:
    """Assert that seeded requests get the results of one process.

    Args:
        engine_options: options of the engine.
    """
    chance = random.Random(seed)
    options: dict[str, Any] = {
        "async_scheduling": chance.random() < 0.5,
        "enable_prefix_caching": chance.random() < 0.7,
        "batch_invariant": chance.random() < 0.3,
        # Groups of layers share the blocks.
        **TIGHT,
        "num_gpu_blocks_override": chance.choice([40, 60]),
        **engine_options,
    }
    args = EngineArgs(str(model), dtype="float32", device="cpu", **options)
    requests = _mixed(seed, find_checkpoint(args).config.vocab_size)
    expected, _ = _run(Engine.from_args(args), requests)
    shared = replace(args, **LAYOUTS[layout])
    with thread_engine(shared, lambda executor: _check_memory(executor, shared)) as engine:
        found, _ = _run(engine, requests)
    # Sums in another order may round a stored key or value to the next code.
    near = 10 * NEAR if "kv_cache_dtype" in engine_options else NEAR
    assert _check_alike(found, expected, near) > 0.9 * len(found)


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_parallel_ranks_give_the_outputs_of_one_process(tensor: int, tiny_llama: Path) -> None:
    args = EngineArgs(str(tiny_llama), dtype="float32", device="cpu", **TIGHT)
    requests = _requests(random.Random(tensor).randrange(1000))
    expected, _ = _run(Engine.from_args(args), requests)
    with thread_engine(replace(args, tensor_parallel_size=tensor)) as engine:
        found, preempted = _run(engine, requests)
    assert _check_alike(found, expected) > 0.9 * len(found)
    assert preempted > 0


@pytest.mark.parametrize(
    ("name", "layout", "seed"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in [*_drawn(24), *_drawn_in_stages()])],
)
def test_all_kinds_of_layers_give_the_outputs_of_one_process(name: str, layout: str, seed: int, tmp_path: Path) -> None:
    save(name, tmp_path)
    _compare(tmp_path, layout, seed)


@pytest.mark.parametrize(
    ("name", "layout", "seed"),
    [case if case in BY_HEADS[1:3] else pytest.param(*case, marks=pytest.mark.slow) for case in BY_HEADS],
)
def test_families_sharded_by_heads_give_the_outputs_of_one_process(
    name: str, layout: str, seed: int, tmp_path: Path
) -> None:
    tiny_gguf(name).save_pretrained(tmp_path)
    _compare(tmp_path, layout, seed)


@pytest.mark.parametrize(
    ("layout", "in_flight"),
    [
        ("PP 3", True),
        pytest.param("PP 3", False, marks=pytest.mark.slow),
        pytest.param("TP 2 PP 2", True, marks=pytest.mark.slow),
        pytest.param("TP 4", False, marks=pytest.mark.slow),
    ],
)
def test_drafts_and_grammars_give_the_outputs_of_one_process(layout: str, in_flight: bool, tmp_path: Path) -> None:
    """Drafts are verified on ranks that get sampled tokens later, and outputs follow their grammars."""
    model = save_model(tmp_path, tiny_llama_model(num_hidden_layers=3, num_key_value_heads=4))
    made = constraints(random.Random(14), 8)
    requests = requests_with_grammars(random.Random(14), made)
    args = EngineArgs(str(model), device="cpu", num_gpu_blocks_override=60, async_scheduling=in_flight, **SMALL)
    proposer = RepeatingProposer()
    found = []
    for sizes in ({}, LAYOUTS[layout]):
        shared = replace(args, **sizes)
        with thread_engine(shared, proposer=proposer if sizes else None) as engine:
            engine.set_token_table(Tokenizer.load(model).token_table())
            found.append(run_with_grammars(engine, requests, random.Random(1)))
    alone, together = ({key: _tokens(output) for key, output in each.items()} for each in found)
    assert together == alone
    assert any(each.grammar is not None for each in requests)


def _tokens(output: list[object]) -> list[object]:
    """Return the output without log-probabilities, which are rounded differently."""
    return [each[0] if isinstance(each, tuple) else each for each in output]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama 4 KV heads", "TP 2 PP 2"),
        *(
            pytest.param(name, layout, marks=pytest.mark.slow)
            for name, layout in [("llama 1 KV head", "TP 4"), ("gemma3", "PP 2"), ("bloom", "TP 3"), ("gpt2", "TP 2")]
        ),
    ],
)
def test_logprobs_in_bfloat16_agree_within_rounding(name: str, layout: str, tmp_path: Path) -> None:
    """Log-probabilities agree within bfloat16's rounding; with stages only, where no sum is split, they are equal."""
    save(name, tmp_path)
    args = EngineArgs(str(tmp_path), dtype="bfloat16", device="cpu", enable_prefix_caching=False, **TIGHT)
    params = SamplingParams(temperature=0, ignore_eos=True, prompt_logprobs=1)
    prompts = [random.Random(length).choices(range(2, 131), k=length) for length in (3, 17, 40, 70)]
    requests = [EngineRequest(f"{n}", prompt, params, 1, n, frozenset()) for n, prompt in enumerate(prompts)]
    found = []
    for sizes in ({}, LAYOUTS[layout]):
        with thread_engine(replace(args, num_gpu_blocks_override=60, **sizes)) as engine:
            outputs, _ = _run(engine, requests)
        found.append([each.logprobs[0] for key in sorted(outputs) for each in outputs[key].prompt_logprobs])
    alone, together = (torch.tensor(each) for each in found)
    if LAYOUTS[layout].get("tensor_parallel_size", 1) == 1:
        assert torch.equal(alone, together)
    assert len(alone) == sum(map(len, prompts)) - len(prompts)
    assert (alone - together).abs().mean() < 0.02 * alone.abs().mean()


@pytest.mark.parametrize("stages", [2, 3])
def test_every_layer_of_every_stage_affects_the_output(stages: int, tmp_path: Path) -> None:
    """Every layer of every stage, and both ends, affect the output."""
    model = save_model(tmp_path, tiny_llama_model(num_hidden_layers=5))
    args = EngineArgs(str(model), dtype="float32", device="cpu", enable_prefix_caching=False, **TIGHT)
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    requests = EngineRequest("r", random.Random(0).sample(range(2, 500), 40), params, 1, 0, frozenset())
    with torch.inference_mode(), thread_engine(replace(args, pipeline_parallel_size=stages)) as engine:

        def likely() -> list[float]:
            outputs, _ = _run(engine, [requests])
            return [each.logprobs[0] for output in outputs.values() for each in output.prompt_logprobs]

        whole, names = likely(), list[str]()
        for runner in engine.executor.runners:  # type: ignore[attr-defined]
            targets = _weight_targets(runner)
            names += targets
            for name in (
                next(iter(targets)),
                *(name for name in targets if name.endswith((".o.weight", ".down.weight"))),
            ):
                kept = targets[name].tensor.clone()
                targets[name].tensor.zero_()
                assert max(abs(a - b) for a, b in zip(likely(), whole, strict=True)) > 1e-3, name
                targets[name].tensor.copy_(kept)
        assert likely() == whole
    alone = Engine.from_args(args)
    assert sorted(names) == sorted(_weight_targets(alone.executor.runner))  # type: ignore[attr-defined]


@contextmanager
def _counted(engine: Engine) -> Iterator[Counter[tuple[str, int]]]:
    """Yield the operations of the last rank during the block: name, and bytes of its input."""
    executor = engine.executor
    assert isinstance(executor, ThreadExecutor)
    ranks = executor.groups[-1].tensor
    assert isinstance(ranks, ThreadRanks)
    before, counts = len(ranks.calls), Counter[tuple[str, int]]()
    yield counts
    executor.shutdown()  # the other ranks may still run
    counts.update(zip(ranks.calls[before:], ranks.sizes[before:], strict=True))


def test_greedy_tokens_are_gathered_as_two_values_per_row(tiny_llama: Path) -> None:
    """A greedy step communicates once per layer operation and once for the result, and broadcasts no tokens later."""
    args = EngineArgs(str(tiny_llama), dtype="float32", device="cpu", tensor_parallel_size=2, **TIGHT)
    rows, length = 4, 6
    plain = [EngineRequest(f"{n}", [5 + n, 6, 7], GREEDY, length, n, frozenset({1})) for n in range(rows)]
    asking = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)
    for requests, num_asking in ((plain, 0), ([*plain[1:], replace(plain[0], params=asking)], 1)):
        with thread_engine(args) as engine:
            runner = engine.executor.runners[-1]  # type: ignore[attr-defined]
            layers, part = runner.model.config.num_hidden_layers, runner.finish.draws.logits.vocabulary.size * 4
            with _counted(engine) as counts:
                for request in requests:
                    engine.add(request)
                while engine.has_work:
                    engine.step()
            reduces = sum(number for (operation, _), number in counts.items() if operation == "all_reduce")
            assert reduces == length * (1 + 2 * layers)
            assert {key: number for key, number in counts.items() if key[0] != "all_reduce"} == {
                ("all_gather", rows * 2 * 8): length,
                **(
                    {("all_gather", num_asking * part): length, ("broadcast", num_asking * 8): length}
                    if num_asking
                    else {}
                ),
            }


@pytest.mark.parametrize(("name", "layout"), [("llama 4 KV heads", "TP 4"), ("deepseek_v3", "EP 4")])
def test_the_weights_of_every_rank_affect_the_output(name: str, layout: str, tmp_path: Path) -> None:
    """Each kind of weights of each rank affects the output: no rank computes everything."""
    save(name, tmp_path)
    args = EngineArgs(str(tmp_path), dtype="float32", device="cpu", enable_prefix_caching=False, **TIGHT)
    args = replace(args, **LAYOUTS[layout])
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    prompt = random.Random(0).sample(range(2, 131), 40)
    with torch.inference_mode(), thread_engine(args) as engine:

        def likely() -> list[float]:
            outputs, _ = _run(engine, [EngineRequest("r", prompt, params, 1, 0, frozenset())])
            return [each.logprobs[0] for output in outputs.values() for each in output.prompt_logprobs]

        whole = likely()
        assert likely() == whole
        for rank, runner in enumerate(engine.executor.runners):  # type: ignore[attr-defined]
            targets = _weight_targets(runner)
            kinds = {name.split(".")[2] if name.startswith("layers.") else name for name in targets}
            for kind in kinds & {"q", "o", "q_b", "v_b", "down", "experts", "shared", "embed.weight", "lm_head.weight"}:
                mine = [target.tensor for name, target in targets.items() if kind in (name, *name.split(".")[2:3])]
                kept = [tensor.clone() for tensor in mine]
                for tensor in mine:
                    tensor.zero_()
                changed = likely()
                assert max(abs(a - b) for a, b in zip(changed, whole, strict=True)) > 1e-3, (rank, kind)
                for tensor, numbers in zip(mine, kept, strict=True):
                    tensor.copy_(numbers)
        assert likely() == whole


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    [("qwen2_moe", "EP 2", "float32"), pytest.param("gemma3", "TP 4", "bfloat16", marks=pytest.mark.slow)],
)
def test_batch_invariant_ranks_give_bitwise_equal_outputs(name: str, layout: str, dtype: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    args = EngineArgs(str(tmp_path), dtype=dtype, device="cpu", batch_invariant=True, **TIGHT)
    requests = [r for r in _mixed(7, 131)[:10] if isinstance(r.params, SamplingParams)]
    with thread_engine(replace(args, num_gpu_blocks_override=60, **LAYOUTS[layout])) as engine:
        together, _ = _run(engine, requests)
        alone: Outputs = {}
        for request in requests:
            engine.add(request)
            alone |= _run(engine, [])[0]
    for key, output in together.items():
        assert (output.token_ids, output.logprobs) == (alone[key].token_ids, alone[key].logprobs)


@pytest.mark.parametrize(
    ("layout", "quantization"),
    [
        ("EP 4", None),  # in MXFP4
        *(
            pytest.param(layout, method, marks=pytest.mark.slow)
            for layout, method in [
                ("TP 2", None),
                ("EP 2", "int8"),
                ("EP 4", "int4"),
                ("TP 2", "fp8"),
                ("EP 2", "fp8"),
                ("PP 2", "int8"),
                ("EP 2 PP 2", None),
                ("EP 2 PP 2", "int4"),
                ("TP 2 PP 2", "fp8"),
            ]
        ),
    ],
)
def test_stacked_experts_give_the_outputs_of_one_process(layout: str, quantization: str | None, tmp_path: Path) -> None:
    """Stacked experts: as in gpt-oss on the hub, or transposed and quantized on load."""
    saved = (save_gpt_oss if quantization is None else unquantized_gpt_oss)(tmp_path)
    assert saved is not None
    _compare(tmp_path, layout, 5, quantization=quantization)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [("mixtral", "EP 2"), ("dbrx", "EP 4"), ("deepseek_v3", "EP 2"), ("mixtral", "PP 2"), ("deepseek_v3", "EP 2 PP 2")],
)
def test_gguf_models_give_the_outputs_of_one_process(name: str, layout: str, tmp_path: Path) -> None:
    path = llama_cpp.write(tiny_gguf(name), tmp_path / "model.gguf")
    _compare(path, layout, 6)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout) if (name, layout) in QUANTIZED_FAST else pytest.param(name, layout, marks=pytest.mark.slow)
        for name in FORMATS
        for layout in ("TP 2", "PP 2", "TP 2 PP 2")
        if layout == "PP 2" or "order" not in name  # stages do not shard it
    ],
)
def test_quantized_checkpoints_give_the_outputs_of_one_process(name: str, layout: str, tmp_path: Path) -> None:
    checkpoint = folder(name, layers=3)
    checkpoint.config["max_position_embeddings"] = TIGHT["max_model_len"]
    for key, tensor in checkpoint.tensors.items():
        # With the largest codes, rounding differences of sums would grow from layer to layer.
        if key.endswith(("scale", "scales")) and tensor.dtype in (torch.float16, torch.bfloat16):
            tensor /= 16
    _compare(checkpoint.write(tmp_path), layout, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "kv_cache_dtype"),
    [
        ("gemma3", "PP 2", "fp8"),
        ("deepseek_v3", "EP 2 PP 2", "fp8"),
        ("llama 4 KV heads", "TP 2 PP 2", "int8_per_token_head"),
    ],
)
def test_quantized_kv_caches_in_stages_give_the_outputs_of_one_process(
    name: str, layout: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    save(name, tmp_path)
    _compare(tmp_path, layout, 20, kv_cache_dtype=kv_cache_dtype)
