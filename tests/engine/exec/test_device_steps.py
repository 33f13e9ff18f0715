"""Steps on an accelerator: their launches, transfers between host and device, and memory.

They use a few layers of real models, by shapes only.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

pytest.importorskip("triton")

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.step import Step
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.exec import build_runner as build_runner_module
from stoker_engine.exec.build_kernels import build_kernels
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.exec.finish.sample import Sampling
from stoker_engine.exec.finish.sampling_graphs import SamplingGraphs
from stoker_engine.exec.runner import Runner
from stoker_engine.grammar.compile import compile_grammar
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.kernels.triton.compile import compile_only as compile_only_module
from stoker_engine.kernels.triton.compile.compile_only import compile_only
from stoker_engine.models.decoder import Decoder
from stoker_engine.sizing.activations import activation_bytes
from stoker_engine.sizing.graph_memory import SAMPLING_LAUNCHES, layer_launches
from stoker_engine.sizing.lora import adapter_bytes
from stoker_engine.sizing.packed_weights import workspace_bytes
from stoker_engine.sizing.step_shapes import logits_row_bytes
from stoker_engine.sizing.weight_formats import ALL_NUMBERS

from ...support.engine.fake_device import (
    DEEPSEEK_V3,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    QWEN3_06B,
    SM_90,
    DeviceTrace,
    bytes_on_device,
    checkpoint,
    decodes,
    fake_device,
    prompts,
    verified,
)

#: Quantization of DeepSeek-V3's checkpoint, and one by llm-compressor.
FP8_BLOCKS: Final = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
W8A8: Final = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        },
    },
}  # fmt: skip
DEEPSEEK_FP8: Final = {**DEEPSEEK_V3, "first_k_dense_replace": 1, "quantization_config": FP8_BLOCKS}
#: Models, their quantization, and the largest number of launches per layer.
MODELS: Final[dict[str, tuple[dict[str, Any], str | None, int]]] = {
    "Qwen3-0.6B": (QWEN3_06B, None, 9),
    "Llama-3-8B": (LLAMA_8B, None, 9),
    "Llama-3-8B int4": (LLAMA_8B, "int4", 12),
    "Llama-3-8B fp8": (LLAMA_8B, "fp8", 10),
    "Llama-3-70B": (LLAMA_70B, None, 10),
    "Mixtral-8x7B": (MIXTRAL, None, 15),
    "Llama-3-8B W8A8": ({**LLAMA_8B, "quantization_config": W8A8}, None, 10),
    "Mixtral-8x7B fp8": (MIXTRAL, "fp8", 16),
    "Mixtral-8x7B Q4_K": (MIXTRAL, "Q4_K", 17),
    "DeepSeek-V3": ({**DEEPSEEK_V3, "first_k_dense_replace": 1}, None, 22),
}
#: Limits of a step for which few graphs are captured.
GRAPHS: Final = {"max_num_batched_tokens": 40, "max_num_seqs": 4}
KERNELS: Final = Path(compile_only_module.__file__).parents[1]
#: Modules to which adapters may be limited.
ATTENTION: Final = ("q_proj", "o_proj")
#: A vocabulary for grammars.
LETTERS: Final = TokenTable.of([b"", b"a", b"b"], special=[0])
GRAMMAR: Final = Grammar(compile_grammar(StructuredOutputs(regex="(a|b)*")))


def traces(
    monkeypatch: pytest.MonkeyPatch,
    config: Mapping[str, Any],
    steps: list[Step],
    quantization: str | None = None,
    graphs: bool = False,
    **sizes: Any,
) -> list[tuple[DeviceTrace, list[tuple[int, ...]]]]:
    """Return the trace of each step, with the shapes that the host read."""
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 64, **sizes}
    found = []
    with monkeypatch.context() as patch, fake_device(patch, graphs=graphs) as reads:
        patch.setattr(build_runner_module, "adapter_reader", lambda *_: None)
        with compile_only(SM_90, lambda kernel, key: None):
            runner = build_runner(EngineArgs("m", device="cuda", **sizes), checkpoint(config, quantization))
        runner.grammars.set_token_table(LETTERS)
        for step in steps:
            reads.clear()
            trace = DeviceTrace()
            with compile_only(SM_90, trace.launched), trace:
                runner.run(step)
            found.append((trace, list(reads)))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_launches_a_limited_number_of_kernels(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes with chunks take two launches more, of attention. The memory of graphs is planned for these launches."""
    config, quantization, max_launches = MODELS[model]
    steps = [prompts(9, 16), decodes(9, 16), prompts(5, decoding=(10, 17))]
    two, three = (traces(monkeypatch, {**config, "num_hidden_layers": count}, steps, quantization) for count in (2, 3))
    planned = layer_launches(ModelConfig.from_dict(config).layers[-1])
    for (less, _), (more, _), is_mixed in zip(two, three, (False, False, True), strict=True):
        launched = more.launches - less.launches
        assert launched.total() <= max_launches + 2 * is_mixed, launched
        assert launched.total() <= planned * (1 if quantization is None else 1.25), launched


def test_fp8_matrices_are_multiplied_by_fp8_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one launch more than in bfloat16, which quantizes attention's result."""
    config, steps = {**LLAMA_8B, "num_hidden_layers": 2}, [prompts(9, 16), decodes(9, 16)]
    plain = traces(monkeypatch, config, steps)
    for (trace, _), (unquantized, _) in zip(traces(monkeypatch, config, steps, "fp8"), plain, strict=True):
        assert trace.launches["_scaled_mm"] == 2 * 4
        assert trace.launches["quantize_rows._quantize_rows"] == 2 * 2
        assert not trace.launches["quant_gemm._quant_gemm"]
        assert trace.launches.total() == unquantized.launches.total() + 2
    for more in ({"fp8_weight_only": True}, {"batch_invariant": True}, {"dtype": "float16"}):
        for trace, _ in traces(monkeypatch, config, steps, "fp8", **more):
            assert trace.launches["quant_gemm._quant_gemm"] == 2 * 4
            assert not trace.launches["_scaled_mm"] and not trace.launches["quantize_rows._quantize_rows"]


def test_block_scales_and_experts_are_multiplied_with_quantized_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense layer and one with experts. The first layer's input norm and all others quantize their results."""
    config, steps = {**DEEPSEEK_FP8, "num_hidden_layers": 2}, [prompts(9, 16), decodes(9, 16)]
    for trace, _ in traces(monkeypatch, config, steps):
        assert trace.launches["w8a8_gemm._w8a8_gemm"] == 2 * 3 + 2 + 2  # attention, MLP, shared experts
        assert trace.launches["grouped_w8a8_gemm._grouped_w8a8_gemm"] == 2
        assert not trace.launches["quant_gemm._quant_gemm"] + trace.launches["grouped_quant_gemm._grouped_quant_gemm"]
    for more in ({"fp8_weight_only": True}, {"batch_invariant": True}):
        for trace, _ in traces(monkeypatch, config, steps, **more):
            assert not trace.launches["w8a8_gemm._w8a8_gemm"] + trace.launches["quantize_rows._quantize_rows"]
            assert trace.launches["grouped_quant_gemm._grouped_quant_gemm"] == 2


def test_int8_is_multiplied_with_quantized_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with --batch-invariant and in float16, since sums are exact; many tokens by torch."""
    config = {**LLAMA_8B, "quantization_config": W8A8, "num_hidden_layers": 2}
    for more in ({}, {"fp8_weight_only": True}, {"batch_invariant": True}, {"dtype": "float16"}):
        few, many = traces(monkeypatch, config, [prompts(9, 16), prompts(200)], **more)
        assert few[0].launches["w8a8_gemm._w8a8_gemm"] == 2 * 4
        assert few[0].launches["quantize_rows._quantize_rows"] == 2 * 2
        if "batch_invariant" in more:
            assert many[0].launches["w8a8_gemm._w8a8_gemm"] == 2 * 4
        else:
            # The last layer's matrices after attention multiply only the last token.
            assert many[0].launches["_int_mm"] == many[0].launches["scale_sums._scale_sums"] == 4 + 1
            assert many[0].launches["w8a8_gemm._w8a8_gemm"] == 3


@pytest.mark.parametrize("model", MODELS)
def test_a_step_uploads_once_and_downloads_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, quantization, _ = MODELS[model]
    steps = [prompts(9, 16), decodes(9, 16)]
    for trace, reads in traces(monkeypatch, {**config, "num_hidden_layers": 2}, steps, quantization):
        assert trace.uploads == 1
        assert reads == [(2,)]


@pytest.mark.parametrize("more", [{}, {"batch_invariant": True, "lora_target_modules": ATTENTION}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_adapters_launch_two_kernels_per_operation(
    model: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kernels per operation if a sequence has an adapter, otherwise none; and no other transfer. With adapters, no
    norm or activation quantizes its result."""
    config, quantization, _ = MODELS[model]
    config = {**config, "num_hidden_layers": 2}
    steps = [prompts(9, 16), prompts(9, 16, adapter_slot=2), decodes(9, 16)]
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "quantize_early", lambda model: None)
        plain = traces(monkeypatch, config, steps, quantization, batch_invariant="batch_invariant" in more)
    found = traces(monkeypatch, config, steps, quantization, enable_lora=True, max_loras=3, **more)
    assert found[0][0].launches == plain[0][0].launches
    for (trace, reads), (without, _) in zip(found[1:], plain[1:], strict=True):
        assert trace.uploads == 1
        assert reads == [(2,)]
        added = trace.launches - without.launches
        shrunk, expanded = (added[f"lora_{kernel}._lora_{kernel}"] for kernel in ("shrink", "expand"))
        assert shrunk > 0
        assert expanded - shrunk == (0 if more else 1)  # the embedding looks up A
        assert 0 < added["align._align"] <= 3  # for all tokens, kept ones, and those with logits


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("Qwen3-0.6B", {}),
        ("Mixtral-8x7B", {}),
        ("Qwen3-0.6B", {"batch_invariant": True}),
        ("Mixtral-8x7B", {"batch_invariant": True, "lora_target_modules": ATTENTION}),
    ],
    ids=str,
)
def test_graphs_launch_the_kernels_of_steps_with_adapters(
    model: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They launch the same kernels as the steps, with adapters and without."""
    config, quantization, _ = MODELS[model]
    config = {**config, "num_hidden_layers": 2}
    steps = [prompts(9, 16, 5), decodes(9, 16, 5), prompts(7, decoding=(10, 17))]
    steps += [prompts(9, 16, 5, adapter_slot=0), decodes(9, 16, 5), prompts(7, decoding=(10, 17), adapter_slot=0)]
    eager, graphs = (
        traces(monkeypatch, config, steps, quantization, graphs, enable_lora=True, **more | GRAPHS)
        for graphs in (False, True)
    )
    for index in (1, 2, 4, 5):
        (one_by_one, _), (replayed, _) = eager[index], graphs[index]
        check_launches(one_by_one, replayed, has_chunks=index in (2, 5))
        assert any("lora_expand" in name for name in replayed.launches) == (index > 3)


def check_launches(eager: DeviceTrace, replayed: DeviceTrace, has_chunks: bool) -> None:
    """Assert that graphs have a step's launches, and a few copies and elementwise operations. With chunks there are
    those for decodes, too, even if there are none. Without a graph, the last layer computes only the tokens that are
    kept.
    """
    added, missing = replayed.launches - eager.launches, eager.launches - replayed.launches
    for name in ("decode._decode_attention", "merge._merge_parts", "decode_splits._decode_splits"):
        of_decodes = added.pop(name, 0)
        assert of_decodes in ((0, 1, 2) if has_chunks else (0,)), name
    names = {name.partition(".")[0] for name in added}
    of_chunks = {"lt", "mul", "maximum", "index", "zeros"}
    assert names <= {"_foreach_copy_", "copy_"} | (of_chunks if has_chunks else set()), added
    assert added.total() <= (11 if has_chunks else 7), added
    assert set(missing) <= ({"index", "align._align"} if has_chunks else set()), missing
    assert replayed.uploads == eager.uploads == 1


@pytest.mark.parametrize("more", [{}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Mixtral-8x7B fp8", "DeepSeek-V3"])
def test_a_graph_launches_the_kernels_of_its_step(
    model: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a captured graph contains no copy between host and device, and the same work: of decodes, of decodes and
    a prompt, of drafts."""
    config, quantization, _ = MODELS[model]
    config = {**config, "num_hidden_layers": 2}
    steps = [prompts(9, 16, 5), decodes(9, 16, 5), prompts(3, 2, decoding=(10, 17)), verified(11, 18, draft=3)]
    eager, graphs = (
        traces(monkeypatch, config, steps, quantization, graphs, **more | GRAPHS)[1:] for graphs in (False, True)
    )
    for index, ((one_by_one, read), (replayed, also_read)) in enumerate(zip(eager, graphs, strict=True)):
        check_launches(one_by_one, replayed, has_chunks=index > 0)
        assert read == also_read


def test_a_replayed_step_allocates_only_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And launches a number of kernels that does not depend on the model: the rest belongs to graphs."""
    config, found = {**LLAMA_8B, "num_hidden_layers": 1}, []
    args = EngineArgs("m", device="cuda", max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=2048)
    args = dataclasses.replace(args, num_gpu_blocks_override=1024)
    with monkeypatch.context() as patch, fake_device(patch, graphs=True), compile_only(SM_90, lambda kernel, key: None):
        runner = build_runner(args, checkpoint(config))
        assert runner.graphs is not None
        for graph in (*itertools.chain(*runner.graphs.captured.values()), *sampling_graphs(runner).captured.values()):
            object.__setattr__(graph, "replay", lambda: None)
        drawn = {"greedy": False, "logprobs": None, "top_k": 5}
        for step in (
            prompts(1500), decodes(1500), prompts(2040, decoding=(1501,)), prompts(1500, **drawn), decodes(1500)
        ):  # fmt: skip
            with DeviceTrace() as trace:
                runner.run(step)
            found.append(trace)
    assert all(trace.peak < 1 << 17 for trace in found)
    assert all(trace.launches.total() <= 15 for trace in found), [trace.launches for trace in found]
    assert [trace.uploads for trace in found] == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Llama-3-8B int4", "Mixtral-8x7B Q4_K"])
def test_graphs_of_sampling_launch_few_kernels(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is planned for these launches and logits. Only graphs with draws draw."""
    config, quantization, _ = MODELS[model]
    args = EngineArgs("m", device="cuda", max_model_len=512, num_gpu_blocks_override=64, **GRAPHS)
    with monkeypatch.context() as patch, fake_device(patch, graphs=True):
        with compile_only(SM_90, lambda kernel, key: None):
            runner = build_runner(args, checkpoint({**config, "num_hidden_layers": 1}, quantization))
        captured = sampling_graphs(runner).captured
        assert captured.keys() == set(itertools.product((1, 2, 4), (False, True)))
        for (rows, draws), graph in captured.items():
            trace = DeviceTrace()
            with compile_only(SM_90, trace.launched), trace:
                graph.replay()
            assert trace.launches.total() <= SAMPLING_LAUNCHES, trace.launches
            assert trace.launches["select_token._sample"] == draws
            assert trace.uploads == 0
            assert trace.peak <= rows * logits_row_bytes(config["vocab_size"], 2) + (1 << 14)


def sampling_graphs(runner: Runner) -> SamplingGraphs:
    assert isinstance(runner.finish, Sampling)
    assert runner.finish.draws.graphs is not None
    return runner.finish.draws.graphs


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_is_launched_before_the_previous_one_is_read(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads nothing until it collects a step, except for penalties, which need the previous tokens."""
    plain = [prompts(9, 16), decodes(9, 16), decodes(10, 17), decodes(11, 18)]
    drawn = [prompts(9, 16, greedy=False, top_k=5, min_tokens=3, logprobs=2, prompt_logprobs=1), *plain[1:]]
    penalised = [prompts(9, 16, repetition_penalty=1.1), *plain[1:]]
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 64}
    with monkeypatch.context() as patch, fake_device(patch, graphs=graphs) as reads:
        with compile_only(SM_90, lambda kernel, key: None):
            config = {**QWEN3_06B, "num_hidden_layers": 2}
            runner = build_runner(EngineArgs("m", device="cuda", **sizes), checkpoint(config))
        with compile_only(SM_90, lambda kernel, key: None), DeviceTrace():
            for steps in (plain, drawn, penalised):
                runner.batch.clear()
                reads.clear()
                runner.launch(steps[0])
                for step in steps[1:]:
                    runner.launch(step)
                    assert reads == []
                    runner.collect()
                    assert (2,) in reads
                    reads.clear()
                runner.collect()
                assert (2,) in reads


def test_a_sampled_step_downloads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
    steps = [prompts(9, 16, greedy=False, logprobs=logprobs, **sampling) for logprobs in (None, 2)]
    (plain, reads), (_, more) = traces(monkeypatch, {**QWEN3_06B, "num_hidden_layers": 1}, steps)
    assert plain.uploads == 2  # sampling parameters follow the step's inputs
    assert reads == [(2,)]
    assert more == [(2, 3), (2, 4), (2,)]  # values, and rank and indices, of each token and of the two likeliest


def test_every_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set()
    more_models: list[tuple[dict[str, Any], str | None, int]] = [
        ({**LLAMA_8B, "architectures": ["GPTNeoXForCausalLM"], "layer_norm_eps": 1e-5}, None, 0),
        ({**QWEN3_06B, "architectures": ["Olmo2ForCausalLM"]}, None, 0),
    ]
    for config, quantization, _ in (*MODELS.values(), *more_models):
        steps = [prompts(9, 16), decodes(9, 16), prompts(9, 16, greedy=False, top_k=5, top_p=0.9)]
        if quantization == "int4" or config.get("quantization_config") == W8A8:
            steps.append(prompts(200))  # so many tokens that matrices are dequantized first
        for trace, _reads in traces(monkeypatch, {**config, "num_hidden_layers": 2}, steps, quantization):
            launched |= {name.partition(".")[0] for name in trace.launches}
    [(trace, _)] = traces(monkeypatch, {**QWEN3_06B, "num_hidden_layers": 1}, [prompts(9)], batch_invariant=True)
    assert not {"mm", "addmm", "bmm"} & set(trace.launches)
    launched |= {name.partition(".")[0] for name in trace.launches}
    [(trace, _)] = traces(
        monkeypatch, {**MIXTRAL, "num_hidden_layers": 1}, [prompts(9)], quantization="fp8", fp8_weight_only=True
    )
    launched |= {name.partition(".")[0] for name in trace.launches}
    constrained = prompts(9, greedy=False, grammar=GRAMMAR)
    [(trace, _)] = traces(monkeypatch, {**QWEN3_06B, "num_hidden_layers": 1, "eos_token_id": 0}, [constrained])
    launched |= {name.partition(".")[0] for name in trace.launches}
    [_, (trace, _)] = traces(
        monkeypatch, {**QWEN3_06B, "num_hidden_layers": 1}, [prompts(9), prompts(9, adapter_slot=0)], enable_lora=True
    )
    launched |= {name.partition(".")[0] for name in trace.launches}
    files = {each.stem for each in KERNELS.rglob("*.py") if "\n@operation(" in each.read_text()}
    assert len(files) > 20
    assert files <= launched


@pytest.mark.parametrize(
    "more",
    [{}, {"kv_cache_dtype": "fp8"}, {"batch_invariant": True}, {"enable_lora": True, "max_loras": 5}],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_compiled_after_the_start(model: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(model)
    shape, quantization, _ = MODELS[model]
    config = {**shape, "num_hidden_layers": 2}
    known = checkpoint(config, quantization)
    sizes = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
    args = EngineArgs("m", device="cuda", num_gpu_blocks_override=1024, **sizes, **more)
    beforehand: set[Any] = set()
    build_kernels(
        args,
        known.config,
        known.weight_formats(torch.bfloat16, torch.device("cuda")),
        torch.bfloat16,
        SM_90,
        lambda *key: beforehand.add(key),
    )
    launched: set[Any] = set()
    with (
        monkeypatch.context() as patch,
        fake_device(patch),
        compile_only(SM_90, lambda *key: launched.add(key)),
    ):
        patch.setattr(build_runner_module, "adapter_reader", lambda *_: None)
        slot = 4 if args.enable_lora else NO_ADAPTER
        runner = build_runner(args, known)
        at_start = set(launched)
        assert at_start <= beforehand
        for count in (1, 2, 16, 17, 64):
            runner.run(prompts(*[rng.randint(1, 60) for _ in range(count)], greedy=count % 2 == 0, adapter_slot=slot))
            runner.run(decodes(*[rng.randint(60, 4095) for _ in range(count)]))
        runner.run(prompts(4096))
    assert launched == at_start


@pytest.mark.parametrize("modules", [(), ATTENTION], ids=str)
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Llama-3-8B int4", "Mixtral-8x7B", "DeepSeek-V3"])
def test_adapter_slots_take_the_counted_memory(
    model: str, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is reserved from the start; that of experts once an adapter changes them."""
    shape, quantization, _ = MODELS[model]
    known = checkpoint({**shape, "num_hidden_layers": 2}, quantization)
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 32, "lora_target_modules": modules}
    taken = []
    for options in ({}, lora):
        with monkeypatch.context() as patch, fake_device(patch), compile_only(SM_90, lambda kernel, key: None):
            patch.setattr(build_runner_module, "adapter_reader", lambda *_: None)
            args = EngineArgs("m", device="cuda", max_model_len=512, num_gpu_blocks_override=64, **options)
            runner = build_runner(args, known)
            taken.append(bytes_on_device())
            del runner
    formats = known.weight_formats(torch.bfloat16, torch.device("cuda"))
    [counted] = adapter_bytes(known.config, 32, 2, formats=formats, target_modules=modules)
    found = taken[1] - taken[0]
    # Besides the matrices there are the tiles of outputs and the ranks.
    assert found <= 3 * counted * 1.01
    if modules or ("num_local_experts" not in shape and "n_routed_experts" not in shape):
        assert found >= 3 * counted * 0.99


def test_nothing_is_compiled_for_any_option_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows of logits than the sampler processes at once, of a vocabulary with unaligned rows."""
    config = {**QWEN3_06B, "num_hidden_layers": 1, "vocab_size": 131075, "eos_token_id": 0}
    sizes = {"max_model_len": 512, "max_num_seqs": 64, "num_gpu_blocks_override": 64}
    launched: set[Any] = set()
    with monkeypatch.context() as patch, fake_device(patch):
        with compile_only(SM_90, lambda *key: launched.add(key)):
            runner = build_runner(EngineArgs("m", device="cuda", **sizes), checkpoint(config))
        runner.grammars.set_token_table(LETTERS)
        at_start = set(launched)
        rules = {"min_tokens": 3, "logit_bias": {3: 1.0}, "presence_penalty": 1.0, "temperature": 0.7}
        with compile_only(SM_90, lambda *key: launched.add(key)):
            for count in (1, 3, 63):
                lengths = [3] * count
                runner.run(prompts(*lengths))
                runner.run(verified(*lengths, draft=2))
                for step in (
                    prompts(*lengths, greedy=False, top_k=5),
                    prompts(*lengths, prompt_logprobs=2, logprobs=1),
                    prompts(*lengths, greedy=False, **rules),
                    prompts(*lengths, greedy=False, grammar=GRAMMAR),
                ):
                    runner.run(step)
                    runner.run(decodes(*lengths))
                    runner.run(verified(*[4] * count, draft=1))
    assert launched == at_start


def test_verified_drafts_add_no_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**LLAMA_8B, "num_hidden_layers": 1}
    _, (trace, reads) = traces(monkeypatch, config, [prompts(9, 16), verified(9, 16, draft=3)])
    assert trace.uploads == 1
    assert reads == [(8,)]


def test_kernels_compiled_beforehand_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = ModelConfig.from_dict({**QWEN3_06B, "num_hidden_layers": 1})
    args = EngineArgs("m", device="cuda")
    assert build_kernels(args, config, ALL_NUMBERS, torch.bfloat16, SM_90)
    assert not build_kernels(args, config, ALL_NUMBERS, torch.bfloat16, SM_90)


#: Families whose layers hold more tensors than others, or in another order.
_FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "GPTNeoX": {"layer_norm_eps": 1e-5, "use_parallel_residual": True},
    "Cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window": 4096},
    "Falcon": {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "alibi": False},
    "Olmo2": {},
    "Gemma3": {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 1024},
    "GptOss": {
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_size": 2880,
    },
}  # fmt: skip


def peak_bytes(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], steps: list[Step], **sizes: Any) -> int:
    """Return the peak bytes of the last step."""
    quantization = sizes.pop("quantization", None)
    return traces(monkeypatch, config, steps, quantization, num_gpu_blocks_override=4096, **sizes)[-1][0].peak


@pytest.mark.parametrize("model", MODELS)
def test_activations_are_within_a_tenth_of_the_plan(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, quantization, _ = MODELS[model]
    config, tokens = {**shape, "num_hidden_layers": 3}, 8192  # the first and the last layer hold less
    sizes = {"max_model_len": tokens, "max_num_seqs": 8, "max_num_batched_tokens": tokens}
    held = peak_bytes(monkeypatch, config, [prompts(*[1024] * 8)], quantization=quantization, **sizes)
    formats = checkpoint(config, quantization).weight_formats(torch.bfloat16, torch.device("cuda"))
    workspace = workspace_bytes(formats)
    planned = activation_bytes(ModelConfig.from_dict(config), tokens, 8, 2, fused=True, workspace=workspace)
    # The plan does not count that the MLP's quantized activations take half as much.
    least = 0.75 if quantization == "fp8" or "quantization_config" in config else 0.9
    assert least * planned <= held <= planned


@pytest.mark.parametrize("family", _FAMILIES)
def test_activations_of_other_families_are_no_more_than_planned(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**LLAMA_8B, "architectures": [f"{family}ForCausalLM"], **_FAMILIES[family], "num_hidden_layers": 2}
    tokens, num_seqs = 8192, 256
    sizes = {"max_model_len": tokens, "max_num_seqs": num_seqs, "max_num_batched_tokens": tokens}
    held = peak_bytes(monkeypatch, config, [prompts(*[32] * num_seqs)], **sizes)
    assert held <= activation_bytes(ModelConfig.from_dict(config), tokens, num_seqs, 2, fused=True)


def test_one_long_sequence_does_not_reserve_its_length_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config, num_seqs = {**LLAMA_8B, "num_hidden_layers": 2, "max_position_embeddings": 131072}, 512
    sizes = {"max_model_len": 65520, "max_num_seqs": num_seqs, "max_num_batched_tokens": 2048}
    steps = [prompts(*[4] * num_seqs), decodes(*[4] * (num_seqs - 1), 65519)]
    held = peak_bytes(monkeypatch, config, steps, **sizes)
    assert held <= activation_bytes(ModelConfig.from_dict(config), 2048, num_seqs, 2, fused=True)


def test_sampling_options_hold_no_more_memory_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "logprobs": 5}
    step = prompts(*[4] * 256, greedy=False, **sampling)
    sizes = {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    held = peak_bytes(monkeypatch, {**QWEN3_06B, "num_hidden_layers": 2}, [step], **sizes)
    assert held <= activation_bytes(ModelConfig.from_dict(QWEN3_06B), 2048, 256, 2, fused=True)
