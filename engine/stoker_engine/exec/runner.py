"""Loads the model onto the device and runs steps there."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from stoker_common.errors import ArgumentError
from stoker_engine.attention.backend import captures_decodes
from stoker_engine.attention.external import AttentionRequirements
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.step import Sampled, Step, StepResult
from stoker_engine.exec.dtypes import resolve_dtype, stored_as
from stoker_engine.exec.graphs import DecodeGraphs, capture_all
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.exec.inputs import InputBuilder, Inputs
from stoker_engine.exec.kv_cache import KVCachePool, plan_kv_cache
from stoker_engine.exec.step_masks import MasksByBatchIndex, StepMasks
from stoker_engine.exec.warm_up import warm_up_steps
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.grammar.masks import FREE
from stoker_engine.kernels.compile_progress import watch_compilations
from stoker_engine.kernels.prebuilt import use_prebuilt
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.loading.load_progress import OnProgress
from stoker_engine.models.model import StepInputs
from stoker_engine.parallel.device import limit_threads, resolve_device, torch_threads
from stoker_engine.parallel.rank_groups import RankGroups
from stoker_engine.parallel.transfer import to_device, to_host
from stoker_engine.sampling.logprobs import token_logprobs
from stoker_engine.sampling.sampler import greedy, sample
from stoker_engine.sampling.sampling_metadata import SamplingMetadata
from stoker_engine.sampling.vocab_parallel_argmax import vocab_parallel_argmax
from stoker_engine.sizing import activations, memory
from stoker_engine.sizing.kv_format import kv_format

logger = logging.getLogger(__name__)

#: Tokens beyond the longest sequence that a row has room for: what a step in flight samples behind the last one.
_SPARE_TOKENS = 16

#: Of logits on a CPU at once, where no more is asked for than which is the largest. What is larger glibc gives back to
#: the system each time, and each page of it would be new in each step.
_KEPT_BYTES = 32 << 20


class Runner:
    """One model on one device.

    Args:
        on_progress: called whenever loading gets on; see `OnProgress`.
        groups: the ranks that compute the model together with this one; None: there are none.

    Attributes:
        plan: the KV cache's size.
        grammars: those that outputs may be constrained by.

    Raises:
        ArgumentError: the device or dtype cannot be had.
        ModelError: the weights do not match, or the model does not fit.
    """

    def __init__(
        self,
        args: EngineArgs,
        checkpoint: Checkpoint,
        on_progress: OnProgress = lambda done, total: None,
        groups: RankGroups | None = None,
    ) -> None:
        self.device = resolve_device(args)
        if self.device.type == "cpu":
            limit_threads()
        self.config = checkpoint.config
        self.dtype = resolve_dtype(args, checkpoint, self.device)
        self._groups = groups = groups or RankGroups()
        self._ranks, self._pipeline = groups.tensor, groups.pipeline
        if args.batch_invariant and self.device.type != "cpu" and self._ranks.size > 1:
            raise ArgumentError(
                "--batch-invariant",
                "GPUs that share layers sum in an order that depends on the batch; choose "
                "--tensor-parallel-size 1, with --pipeline-parallel-size or --data-parallel-size for more GPUs",
            )
        served = AttentionRequirements(
            [layer.attention for layer in self.config.layers],
            self.dtype,
            kv_format(args.kv_cache_dtype, str(self.dtype)).dtype,
            args.block_size,
        )
        self._backend = attention_backend(self.device, served, args.batch_invariant, args.attention_backend)
        self._kernels = select_kernels(self.device, self.dtype, args.batch_invariant)
        build = Build(
            self.dtype,
            self._backend,
            self._kernels,
            self._ranks,
            stage=groups.pipeline.stage,
            whole_experts=args.enable_expert_parallel,
        )
        self._vocabulary = build.share(self.config.vocab_size)
        self._widths = build.widths(self.config.vocab_size)
        formats = checkpoint.weight_formats(self.dtype, self.device)
        self.plan = plan_kv_cache(args, self.config, self.dtype, self.device, groups, formats)
        scales = checkpoint.kv_scales(args.kv_cache_dtype, build)
        started = time.monotonic()
        with torch.inference_mode():
            self.model = checkpoint.load(build, self.device, self.plan.max_model_len, on_progress)
            specs = memory.layer_caches(self.config, self._ranks.size)
            self._pool = KVCachePool(self.plan, specs, self.dtype, self.device, scales, build.stage)
        stored = stored_as(args, checkpoint, self.device)
        logger.info(
            "loaded on %s in %.1f s: weights as %s, computed in %s, keys and values as %s",
            self.device,
            time.monotonic() - started,
            stored.weights,
            stored.dtype,
            stored.kv_cache_dtype,
        )
        if args.dtype == "auto" and stored.dtype != self.config.dtype.removeprefix("torch."):
            logger.info("the kernels of CPUs have no %s, hence %s", self.config.dtype, stored.dtype)
        # The Transformers backend computes with torch's operators, our decoder with kernels that share work themselves.
        native = self._backend.capabilities.has_threads and isinstance(self.model, Decoder)
        self._torch_threads = 1 if native else None
        self._rows_at_once = activations.sampler_rows(
            self.config.vocab_size, min(args.max_num_seqs, args.max_num_batched_tokens)
        )
        on_cpu = self.device.type == "cpu"
        self._logits_at_once = max(1, _KEPT_BYTES // (2 * self.config.vocab_size)) if on_cpu else args.max_num_seqs
        self._inputs = InputBuilder(args.block_size, self.plan.groups, self.device)
        self.grammars = Grammars(self.config.vocab_size, self.config.eos_token_ids)
        self._masks = StepMasks(self.grammars)
        self._batch = self._no_rows(args)
        self._graphs: DecodeGraphs | None = None
        if self.device.type != "cpu":
            self._warm_up(args, on_progress)
            if not args.enforce_eager:
                with torch.inference_mode():
                    self._graphs = self._captured(args, on_progress)

    def _no_rows(self, args: EngineArgs) -> InputBatch:
        num_tokens = self.plan.max_model_len + _SPARE_TOKENS
        return InputBatch(args.max_num_seqs, num_tokens, args.block_size, self.plan.groups)

    def _warm_up(self, args: EngineArgs, on_progress: OnProgress) -> None:
        """Has what a device computes with compiled before the first request; what is compiled stays in a cache."""
        started = time.monotonic()
        use_prebuilt()
        limits = args.max_num_seqs, args.max_num_batched_tokens, self.plan.max_model_len
        with watch_compilations(lambda: on_progress(0, 0)) as compiled:
            for step in warm_up_steps(*limits, len(self.plan.groups)):
                self.run(step)
                on_progress(0, 0)
            self._constrain_nothing()
        self._batch = self._no_rows(args)
        logger.info("ran each kernel once in %.1f s, %d of them compiled", time.monotonic() - started, len(compiled))

    def _captured(self, args: EngineArgs, on_progress: OnProgress) -> DecodeGraphs | None:
        """Decodes as CUDA graphs, where they can be: ranks that work together go kernel by kernel, and so do models
        that keep a state of each sequence."""
        alone = self._ranks.size == 1 and self._pipeline.stage.count == 1
        of_tokens = all(group.kind == "tokens" for group in self.plan.groups)
        if not (alone and of_tokens and captures_decodes(self._backend) and isinstance(self.model, Decoder)):
            return None
        max_seqs = min(args.max_num_seqs, args.max_num_batched_tokens)
        blocks = self._batch.tables.shape[2]
        graphs = DecodeGraphs(self.model, self._backend, self.plan, self._pool.caches, max_seqs, blocks, self.device)
        return graphs if capture_all(graphs, lambda: on_progress(0, 0)) else None

    def _constrain_nothing(self) -> None:
        """What grammars leave of a row of logits; no step of the warm-up has a grammar."""
        size = self.config.vocab_size
        any_token = np.full((1, -(-size // 32)), -1, dtype=np.int32)
        logits = torch.zeros((1, size), device=self.device)
        self._kernels.keep_allowed(logits, to_device([0], self.device), to_device(any_token, self.device))

    def run(self, step: Step) -> StepResult:
        """Computes a step and samples. Unless there are stages, the tokens of the first child of each sequence are in
        its row then. One of all ranks has a result, `RankGroups.samples`."""
        with torch.inference_mode(), torch_threads(self._torch_threads):
            started = time.monotonic()
            self._batch.apply(step)
            for draft in step.drafts:
                end = step.starts[draft.batch_index] + step.lengths[draft.batch_index]
                self._batch.token_ids[step.rows[draft.batch_index], end - len(draft.token_ids) : end] = draft.token_ids
            self._pool.copy(step.copies)
            graph = self._graphs.find(step) if self._graphs is not None else None
            inputs = self._inputs.build(step, self._batch, graph.size if graph is not None else None)
            plan = self._backend.prepare(inputs.metadata) if graph is None else None
            masks = self._masks.launch(step, self._batch) if self._groups.samples else None
            prepared = time.monotonic()
            if graph is not None:
                hidden = graph.run(inputs)[: len(step.rows)]
            else:
                logit_rows = self._logit_rows(inputs, step)
                hidden = self._forward(
                    StepInputs(inputs.token_ids, inputs.positions, plan, self._pool.caches, logit_rows)
                )
            if not self._pipeline.stage.is_last:
                self._pipeline.send(hidden)
                return StepResult([], {}, prepared - started, time.monotonic() - prepared)
            # No copy where they are all of them.
            rows = hidden if len(inputs.logit_rows) == len(hidden) else hidden[inputs.logit_rows]
            first, *more_parts = self._parts(rows, step)
            logits = self._logits(first) if len(rows) else None
            computed = time.monotonic()
            masks_by_index = masks.result() if masks is not None else {}
            sampled = self._sample(logits, step, masks_by_index) if logits is not None else []
            for part in more_parts:
                sampled += self._draw(self._logits(part), [None] * len(part))
            if logits is not None and self._pipeline.stage.count == 1:
                self._keep_sampled(step, sampled)
            prompt_logprobs = self._all_prompt_logprobs(hidden, inputs, step)
            sample_time = time.monotonic() - computed
            return StepResult(sampled, prompt_logprobs, prepared - started, computed - prepared, sample_time)

    def _parts(self, rows: torch.Tensor, step: Step) -> Sequence[torch.Tensor]:
        """Those whose logits are made at once."""
        if len(rows) <= self._logits_at_once or not self._is_plain(step):
            return (rows,)
        parts: Sequence[torch.Tensor] = rows.split(self._logits_at_once)
        return parts

    def _logit_rows(self, inputs: Inputs, step: Step) -> torch.Tensor | None:
        """`StepInputs.rows`: all where all have logits, or where others need them: the next stage, or a prompt's
        log-probabilities."""
        if len(inputs.logit_rows) == len(inputs.token_ids) or not self._pipeline.stage.is_last:
            return None
        return inputs.logit_rows if self._batch.wants_prompt_logprobs.isdisjoint(step.rows) else None

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        """This stage's part of the model: see `Model.forward`."""
        if self._pipeline.stage.is_first:
            return self.model.forward(inputs)
        shape = len(inputs.token_ids), self.config.hidden_size
        return self.model.forward(inputs, self._pipeline.receive(shape, self.dtype, self.device))

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, this rank's part of the vocabulary] float32, or bfloat16 where `argmax` takes it."""
        logits = self.model.logits(rows)
        return logits if self._kernels.narrow_logits and logits.dtype == torch.bfloat16 else logits.float()

    def _sample(self, logits: torch.Tensor, step: Step, masks: MasksByBatchIndex) -> list[Sampled]:
        """Of each sequence that samples: what was drawn, drafts verified. Of ranks that share the vocabulary, each
        knows the likeliest tokens, and the one that samples all others."""
        drafts = {draft.batch_index: draft.token_ids for draft in step.drafts}
        if self._is_plain(step):
            return self._draw(logits, [None] * len(logits))
        choices: list[SamplingMetadata | None] = []
        shares = zip(step.rows, step.starts, step.lengths, step.num_samples, strict=True)
        for batch_index, (row, start, length, num_samples) in enumerate(shares):
            if num_samples:
                draft = drafts.get(batch_index, [])
                position = start + length - len(draft)
                sequence_masks = masks.get(batch_index, [FREE] * (1 + len(draft)))
                choices += [
                    self._batch.choice(row, position + held, num_samples, draft[:held], mask)
                    for held, mask in enumerate(sequence_masks)
                ]
        drawn = iter(self._draw(logits, choices))
        sampling_indices = [batch_index for batch_index, num_samples in enumerate(step.num_samples) if num_samples]
        verified = []
        for batch_index in sampling_indices:
            draft = drafts.get(batch_index, [])
            sequence_masks = masks.get(batch_index, [FREE] * (1 + len(draft)))
            verified.append(
                _verified([next(drawn) for _ in sequence_masks], draft, [mask.error for mask in sequence_masks])
            )
        return verified

    def _is_plain(self, step: Step) -> bool:
        """Whether each sequence that samples wants its likeliest token, and nothing else."""
        if step.drafts or max(step.num_samples, default=0) != 1:
            return False
        asking = self._batch.asking
        if asking.isdisjoint(step.rows):
            return True
        return not any(num and row in asking for row, num in zip(step.rows, step.num_samples, strict=True))

    def _draw(self, logits: torch.Tensor, choices: list[SamplingMetadata | None]) -> list[Sampled]:
        """By each row of this rank's part of the logits. Other parts are gathered of those rows alone that more is
        asked of than the likeliest token."""
        if self._ranks.size == 1:
            return sample(logits, choices, self._rows_at_once, self._kernels)
        drawn = greedy(*vocab_parallel_argmax(logits, self._vocabulary.start, self._ranks, self._kernels.argmax))
        asking = [row for row, choice in enumerate(choices) if choice is not None]
        if asking:
            rows = logits if len(asking) == len(choices) else logits[to_device(asking, self.device)]
            rows, row_choices = self._ranks.all_gather(rows.float(), self._widths), [choices[row] for row in asking]
            if self._groups.samples:
                for row, sampled in zip(
                    asking, sample(rows, row_choices, self._rows_at_once, self._kernels), strict=True
                ):
                    drawn[row] = sampled
        return drawn

    def _keep_sampled(self, step: Step, sampled: list[Sampled]) -> None:
        """Writes the tokens of each first child into its row."""
        sampling_indices = [batch_index for batch_index, num_samples in enumerate(step.num_samples) if num_samples]
        tokens = [drawn.token_ids[0] if drawn.token_ids else [] for drawn in sampled]
        if self._ranks.size > 1:
            tokens = self._from_first_rank(tokens, sampling_indices, step)
        if step.drafts:
            drafted = {draft.batch_index: len(draft.token_ids) for draft in step.drafts}
            for batch_index, row_tokens in zip(sampling_indices, tokens, strict=True):
                end = step.starts[batch_index] + step.lengths[batch_index] - drafted.get(batch_index, 0)
                self._batch.append(step.rows[batch_index], end, row_tokens)
            return
        first_tokens = [
            (batch_index, row_tokens[0])
            for batch_index, row_tokens in zip(sampling_indices, tokens, strict=True)
            if row_tokens
        ]
        rows = [step.rows[batch_index] for batch_index, _ in first_tokens]
        self._batch.append_one(
            rows, [step.starts[p] + step.lengths[p] for p, _ in first_tokens], [token for _, token in first_tokens]
        )

    def _from_first_rank(self, tokens: list[list[int]], batch_indices: list[int], step: Step) -> list[list[int]]:
        """The tokens of the sequences at `batch_indices`; those that are more than likeliest are known to the first
        rank."""
        asking = [
            index
            for index, batch_index in enumerate(batch_indices)
            if step.num_samples[batch_index] > 1 or step.rows[batch_index] in self._batch.asking
        ]
        if not asking:
            return tokens
        longest = 1 + max((len(draft.token_ids) for draft in step.drafts), default=0)
        padded = np.full((len(asking), longest), -1, dtype=np.int64)
        for row, index in zip(padded, asking, strict=True):
            row[: len(tokens[index])] = tokens[index]
        received = to_host(self._ranks.broadcast(to_device(padded, self.device)))
        for index, row_tokens in zip(asking, received, strict=True):
            tokens[index] = [token for token in row_tokens if token >= 0]
        return tokens

    def _all_prompt_logprobs(
        self, hidden: torch.Tensor, inputs: Inputs, step: Step
    ) -> dict[int, list[TokenLogprobs] | None]:
        """By index in the batch, of those that ask for it."""
        found: dict[int, list[TokenLogprobs] | None] = {}
        if self._batch.wants_prompt_logprobs.isdisjoint(step.rows):
            return found
        for batch_index, (row, start, length) in enumerate(zip(step.rows, step.starts, step.lengths, strict=True)):
            positions = self._batch.prompt_positions(row, start, start + length)
            if positions:
                first = int(inputs.ends[batch_index]) - length - start
                found[batch_index] = self._prompt_logprobs(hidden, first, row, positions)
                self._batch.states[row].num_prompt_logprobs = positions.stop
        return found

    def _prompt_logprobs(
        self, hidden: torch.Tensor, first: int, row: int, positions: range
    ) -> list[TokenLogprobs] | None:
        """Of the prompt tokens that follow `positions`, position 0 being flat row `first`; a few rows at a time, so
        that memory never spikes. None where logits are no finite numbers."""
        params = self._batch.states[row].new.spec.params
        assert params.prompt_logprobs is not None
        found: list[TokenLogprobs] = []
        is_finite = True
        for start in range(positions.start, positions.stop, self._rows_at_once):
            stop = min(start + self._rows_at_once, positions.stop)
            logits = self._ranks.all_gather(
                self.model.logits(hidden[first + start : first + stop]).float(), self._widths
            )
            is_finite = is_finite and bool(to_host(self._kernels.argmax(logits)[1].isfinite().all()))
            if is_finite and self._groups.samples:
                tokens = self._batch.token_ids[row, start + 1 : stop + 1].tolist()
                found += token_logprobs(logits, tokens, [params.prompt_logprobs] * len(tokens), self._kernels.logprobs)
        return found if is_finite else None


def _verified(drawn: list[Sampled], draft: list[int], errors: list[str | None]) -> Sampled:
    """What the sequence gets of a draft: the tokens that the model drew as well, and the one that it drew after them.

    Each row was sampled as if the draft before it held. Since a draw depends on nothing but seed and position, what
    comes out is what would have come out without any draft.

    Args:
        errors: why there is no next token, by the row's grammar.
    """
    if errors[0] is not None:
        return Sampled([], error=errors[0])
    if not draft:
        return drawn[0]
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for sampled, drafted, error in zip(drawn, [*draft, None], errors, strict=True):
        if error is not None:
            break  # which the next step finds, too
        if sampled.is_corrupted:
            return sampled
        [[token]] = sampled.token_ids
        tokens.append(token)
        if sampled.logprobs is not None:
            logprobs += sampled.logprobs[0]
        if token != drafted:
            break
    return Sampled([tokens], [logprobs] if logprobs else None)
