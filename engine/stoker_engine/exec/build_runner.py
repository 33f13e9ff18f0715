"""Builds a runner: loads the model, allocates its KV cache and, on GPUs, runs the warm-up and captures graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from stoker_common.errors import ArgumentError
from stoker_engine.attention.backend import captures_steps
from stoker_engine.attention.external import AttentionRequirements
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.exec.capture import capture_all
from stoker_engine.exec.capture_agreement import all_agree
from stoker_engine.exec.device_batch import DeviceBatch
from stoker_engine.exec.dtypes import resolve_dtype, stored_as
from stoker_engine.exec.finish.draw_tokens import TokenDraws
from stoker_engine.exec.finish.finish import Finish
from stoker_engine.exec.finish.logits import Logits
from stoker_engine.exec.finish.next_stage import SendToNextStage
from stoker_engine.exec.finish.prompt_logprobs import PromptLogprobs
from stoker_engine.exec.finish.sample import Sampling
from stoker_engine.exec.finish.sampling_graphs import SamplingGraphs
from stoker_engine.exec.graphs import StepGraphs
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.exec.inputs import InputBuilder
from stoker_engine.exec.kv_cache import KVCachePlan, KVCachePool, plan_kv_cache
from stoker_engine.exec.runner import Runner
from stoker_engine.exec.step_masks import StepMasks
from stoker_engine.exec.warm_up import warm_up_steps
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.compile_progress import watch_compilations
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.kernels.prebuilt import use_prebuilt
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.build import Build
from stoker_engine.lora.adapter_reader import adapter_reader
from stoker_engine.lora.loaded_adapters import LoadedAdapters
from stoker_engine.lora.slot_stacks import grouped_adapters
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.loading.load_progress import OnProgress
from stoker_engine.models.model import Model
from stoker_engine.parallel.device import limit_threads, resolve_device
from stoker_engine.parallel.rank_groups import RankGroups
from stoker_engine.parallel.transfer import to_device
from stoker_engine.sizing import activations, memory
from stoker_engine.sizing.kv_format import kv_format

logger = logging.getLogger(__name__)

#: Creates the finish of steps, from a model and the batch.
MakeFinish = Callable[[Model, InputBatch], Finish]

#: Tokens per row beyond the longest sequence, for tokens that a step in flight samples after a sequence's last token.
_SPARE_TOKENS: Final = 16

#: Maximum size of a chunk of greedy logits on a CPU, in bytes. glibc returns larger allocations to the system
#: each time, so each step would page-fault them again.
_KEPT_BYTES: Final = 32 << 20


def build_runner(
    args: EngineArgs,
    checkpoint: Checkpoint,
    on_progress: OnProgress = lambda done, total: None,
    groups: RankGroups | None = None,
    adapt: Callable[[Build], Build] = lambda build: build,
    make_finish: MakeFinish | None = None,
    lap: Callable[[str], None] = lambda part: None,
) -> Runner:
    """Load a model and build its runner.

    Args:
        on_progress: called whenever loading progresses; see `OnProgress`.
        groups: the groups of the ranks that share the model; None: a single rank.
        adapt: modifies how the layers are built, for example extends them or omits the head.
        make_finish: creates the finish of the last stage; None: sampling.
        lap: called with the name of each part of loading when it ends.

    Raises:
        ArgumentError: an argument is not supported on this device or with this model.
        ModelError: the model cannot be loaded, for example because it does not fit.
    """
    device = resolve_device(args)
    if device.type == "cpu":
        limit_threads()
    dtype, groups = resolve_dtype(args, checkpoint, device), groups or RankGroups()
    build = _build(args, checkpoint, device, dtype, groups)
    adapters = _adapters(args, checkpoint, device, dtype, build.kernels)
    if adapters is not None:
        build = replace(build, extend=adapters.extend)
    build = adapt(build)
    lap("kernels")
    formats = checkpoint.weight_formats(dtype, device)
    plan = plan_kv_cache(args, checkpoint.config, dtype, device, groups, formats)
    model, pool = _load(args, checkpoint, build, plan, device, on_progress)
    lap("weights")
    batch = InputBatch(plan.max_num_seqs, plan.max_model_len + _SPARE_TOKENS, args.block_size, plan.groups)
    device_batch = DeviceBatch(batch.values, device)
    build.rows.adapters = device_batch.adapters
    if adapters is not None:
        adapters.settle(build.rows)
    grammars = Grammars(checkpoint.config.vocab_size, checkpoint.config.eos_token_ids)
    if not groups.pipeline.stage.is_last:
        finish: Finish = SendToNextStage(groups.pipeline)
    elif make_finish is not None:
        finish = make_finish(model, batch)
    else:
        finish = _sampling(plan, build, model, device_batch, batch, grammars, device, groups)
    # The Transformers backend uses torch's operators, while our decoder's kernels are multi-threaded themselves.
    shares_work = model.backend.capabilities.has_threads and isinstance(model, Decoder)
    runner = Runner(
        device=device,
        dtype=dtype,
        plan=plan,
        model=model,
        pool=pool,
        batch=batch,
        inputs=InputBuilder(args.block_size, plan.groups, device, batch, device_batch, gathers=device.type != "cpu"),
        rows=build.rows,
        finish=finish,
        grammars=grammars,
        pipeline=groups.pipeline,
        adapters=adapters,
        num_torch_threads=1 if shares_work else None,
        # The reference kernels, and LoRA without grouped kernels, make the host wait for the device within a step.
        runs_ahead=device.type != "cpu"
        and build.kernels.argmax is not REFERENCE.argmax
        and (adapters is None or build.kernels.lora is not None),
    )
    if device.type != "cpu":
        _warm_up(runner, build.kernels, on_progress)
        if not args.enforce_eager and all_agree(groups.engine, _can_be_captured(runner, build)):
            with torch.inference_mode():
                _capture_graphs(runner, device_batch, groups, on_progress)
    lap("warm-up")
    return runner


def _build(
    args: EngineArgs,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    groups: RankGroups,
) -> Build:
    """Return how the layers are built."""
    if args.batch_invariant and device.type != "cpu" and groups.tensor.size > 1:
        raise ArgumentError(
            "--batch-invariant",
            "with tensor parallelism on GPUs the order of summation depends on the batch; use "
            "--tensor-parallel-size 1, with --pipeline-parallel-size or --data-parallel-size for more GPUs",
        )
    requirements = AttentionRequirements(
        [layer.attention for layer in checkpoint.config.layers],
        dtype,
        kv_format(args.kv_cache_dtype, str(dtype)).dtype,
        args.block_size,
    )
    return Build(
        dtype,
        attention_backend(device, requirements, args.batch_invariant, args.attention_backend),
        select_kernels(device, dtype, args.batch_invariant, args.fp8_weight_only),
        groups.tensor,
        stage=groups.pipeline.stage,
        whole_experts=args.enable_expert_parallel,
    )


def _adapters(
    args: EngineArgs, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, kernels: Kernels
) -> LoadedAdapters | None:
    """Return the LoRA adapters; None: LoRA is off."""
    if not args.enable_lora:
        return None
    reader = adapter_reader(checkpoint, args, dtype)
    grouped = grouped_adapters(args, checkpoint.config, kernels)
    return LoadedAdapters(reader, dtype, args.max_loras, device, cpu_library(device, dtype), grouped)


def _load(
    args: EngineArgs,
    checkpoint: Checkpoint,
    build: Build,
    plan: KVCachePlan,
    device: torch.device,
    on_progress: OnProgress,
) -> tuple[Model, KVCachePool]:
    """Load the model, and allocate its KV cache."""
    scales = checkpoint.kv_scales(args.kv_cache_dtype, build)
    started = time.monotonic()
    with torch.inference_mode():
        model = checkpoint.load(build, device, plan.max_model_len, on_progress)
        specs = memory.layer_caches(checkpoint.config, build.ranks.size)
        pool = KVCachePool(plan, specs, build.dtype, device, scales, build.stage)
    stored = stored_as(args, checkpoint, device)
    logger.info(
        "loaded on %s in %.1f s: weights as %s, computed in %s, keys and values as %s",
        device,
        time.monotonic() - started,
        stored.weights,
        stored.dtype,
        stored.kv_cache_dtype,
    )
    if args.dtype == "auto" and stored.dtype != checkpoint.config.dtype.removeprefix("torch."):
        logger.info("the CPU kernels do not support %s; using %s", checkpoint.config.dtype, stored.dtype)
    return model, pool


def _sampling(
    plan: KVCachePlan,
    build: Build,
    model: Model,
    device_batch: DeviceBatch,
    batch: InputBatch,
    grammars: Grammars,
    device: torch.device,
    groups: RankGroups,
) -> Sampling:
    vocab_size = model.config.vocab_size
    rows_at_once = activations.sampler_rows(vocab_size, min(plan.max_num_seqs, plan.step_tokens))
    on_cpu, has_stages = device.type == "cpu", groups.pipeline.stage.count > 1
    vocabulary, widths = build.share(vocab_size), build.widths(vocab_size)
    logits = Logits(model, build.kernels, build.ranks, vocabulary, widths, build.rows)
    draws = TokenDraws(
        batch=batch,
        logits=logits,
        rows_at_once=rows_at_once,
        logits_at_once=max(1, _KEPT_BYTES // (build.dtype.itemsize * vocab_size)) if on_cpu else plan.max_num_seqs,
        samples=groups.samples,
        shares_drawn=not has_stages,
    )
    return Sampling(
        batch=batch,
        masks=StepMasks(grammars),
        draws=draws,
        prompt_logprobs=PromptLogprobs(batch, logits, rows_at_once, groups.samples),
        keeps_sampled=not has_stages,
        device_batch=device_batch if not has_stages and not on_cpu else None,
    )


def _warm_up(runner: Runner, kernels: Kernels, on_progress: OnProgress) -> None:
    """Run warm-up steps on a GPU, so that kernels are compiled before the first request."""
    started = time.monotonic()
    use_prebuilt()
    plan = runner.plan
    limits = plan.max_num_seqs, plan.step_tokens, plan.max_model_len
    with watch_compilations(lambda: on_progress(0, 0)) as compiled:
        slot = NO_ADAPTER if runner.adapters is None else 0
        for step in warm_up_steps(*limits, len(runner.plan.groups), slot):
            runner.run(step)
            on_progress(0, 0)
        _constrain_nothing(runner, kernels)
    runner.batch.clear()
    logger.info("warm-up took %.1f s; %d kernels were compiled", time.monotonic() - started, len(compiled))


def _constrain_nothing(runner: Runner, kernels: Kernels) -> None:
    """Run the kernel that applies grammar masks, since no step of the warm-up has a grammar."""
    size = runner.model.config.vocab_size
    any_token = np.full((1, -(-size // 32)), -1, dtype=np.int32)
    logits = torch.zeros((1, size), device=runner.device)
    kernels.keep_allowed(logits, to_device([0], runner.device), to_device(any_token, runner.device))


def _can_be_captured(runner: Runner, build: Build) -> bool:
    """Whether steps can be captured as CUDA graphs. Not supported: models that keep a state per sequence, models of the
    Transformers backend, attention backends that cannot be captured, and LoRA if the host waits within a step for
    adapters (without grouped kernels, or if experts may have adapters), or if ranks have different experts, so that an
    adapter may change those of some ranks only."""
    waits = runner.adapters is not None and (
        build.kernels.lora is None or runner.rows.extends_experts or (build.whole_experts and build.ranks.size > 1)
    )
    of_tokens = all(group.kind == "tokens" for group in runner.plan.groups)
    return not waits and of_tokens and captures_steps(runner.model.backend) and isinstance(runner.model, Decoder)


def _capture_graphs(runner: Runner, device_batch: DeviceBatch, groups: RankGroups, on_progress: OnProgress) -> None:
    """Let the runner replay graphs, unless they cannot be captured."""
    max_seqs = min(runner.plan.max_num_seqs, runner.plan.step_tokens)
    graphs = StepGraphs(
        runner.model,
        runner.plan,
        runner.pool.caches,
        device_batch,
        runner.rows,
        max_seqs=max_seqs,
        max_blocks=runner.batch.tables.shape[2],
        device=runner.device,
        has_adapters=runner.adapters is not None,
        receives=None if groups.pipeline.stage.is_first else runner.dtype,
    )
    finish, sampling = runner.finish, None
    if isinstance(finish, Sampling):
        sampling = SamplingGraphs(finish.draws.logits, max_seqs, runner.dtype, runner.device)
    if capture_all(graphs, sampling, runner.plan.graph_bytes, lambda: on_progress(0, 0), groups.engine):
        runner.graphs = graphs
    if isinstance(finish, Sampling) and sampling is not None and sampling.captured:
        runner.finish = replace(finish, draws=replace(finish.draws, graphs=sampling))
