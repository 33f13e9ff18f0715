"""Computes the grammar masks of a step's rows, in a thread that runs concurrently with the model.

A row's matcher is a cache: its state is a function of the row's output tokens. After a preemption or a fork, a sequence
therefore starts with a new matcher, which consumes the whole output.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from stoker_engine.core.step import Step
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.grammar.masks import FREE, Mask, Masks
from stoker_engine.grammar.matcher import GrammarError, Matcher

#: By batch index of sequences that sample and have a grammar: a mask for the next token, and one after each token of
#: the draft.
MasksByBatchIndex = dict[int, list[Mask]]


class StepMasks:
    """Computes the masks of steps, one step at a time."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._masks = Masks(grammars.vocab_size, grammars.eos_token_ids)
        self._thread: ThreadPoolExecutor | None = None

    def launch(self, step: Step, rows: InputBatch, sampling: list[int]) -> Future[MasksByBatchIndex] | None:
        """Start to compute the masks of a step whose changes `rows` already contain. None: no sequence of `sampling`
        has a grammar. The rows must not be modified until the future is done.

        Args:
            sampling: batch indices of sequences that sample and whose tokens are all known.
        """
        batch_indices = [each for each in sampling if step.rows[each] in rows.constrained] if rows.constrained else []
        if not batch_indices:
            return None
        self._thread = self._thread or ThreadPoolExecutor(1, "masks")
        return self._thread.submit(self._find, step, rows, batch_indices)

    def _find(self, step: Step, rows: InputBatch, batch_indices: list[int]) -> MasksByBatchIndex:
        drafts = {draft.batch_index: draft.token_ids for draft in step.drafts}
        found: MasksByBatchIndex = {}
        matchers: list[Matcher] = []
        ignores_eos: list[bool] = []
        matched: list[tuple[int, int]] = []  # batch index, number of preceding draft tokens
        for batch_index in batch_indices:
            row, draft = step.rows[batch_index], drafts.get(batch_index, [])
            params = rows.states[row].new.spec.params
            found[batch_index] = [FREE] * (1 + len(draft))
            try:
                matcher = self._matcher(rows, row, step.starts[batch_index] + step.lengths[batch_index] - len(draft))
            except GrammarError as error:
                found[batch_index] = [Mask(error=str(error))] * (1 + len(draft))
                continue
            for held in range(1 + len(draft)):
                matchers.append(matcher)
                ignores_eos.append(params.ignore_eos)
                matched.append((batch_index, held))
                if held < len(draft):
                    matcher = matcher.copy()
                    matcher.consume([draft[held]])
                    if matcher.error is not None and not matcher.is_worn:  # the grammar rejects the rest of the draft
                        break
        masks = self._masks.compute(matchers, ignores_eos)
        for (batch_index, held), matcher, mask in zip(matched, matchers, masks, strict=True):
            if mask.error is not None and matcher.is_worn:
                mask = self._find_again(rows, step.rows[batch_index], matcher, drafts.get(batch_index, [])[:held])
            found[batch_index][held] = mask
        return found

    def _find_again(self, rows: InputBatch, row: int, worn: Matcher, drafted: list[int]) -> Mask:
        """Compute the mask after a row's output and the draft tokens `drafted` again; see `Matcher.is_worn`."""
        state = rows.states[row]
        spec, matcher = state.new.spec, state.matcher
        assert spec.grammar is not None and matcher is not None
        if matcher.shared is not None:
            start = state.num_prompt_tokens
            known = rows.token_ids[row, start : start + matcher.num_consumed]
            try:
                matcher = state.matcher = self._grammars.begin_again(spec.grammar, worn)
            except GrammarError as error:
                return Mask(error=str(error))
            matcher.consume(known.tolist())
        if drafted:
            matcher = matcher.copy()
            matcher.consume(drafted)
        return self._masks.compute([matcher], [spec.params.ignore_eos])[0]

    def _matcher(self, rows: InputBatch, row: int, position: int) -> Matcher:
        """Return the row's matcher after it has consumed the output before `position`."""
        state = rows.states[row]
        assert state.new.spec.grammar is not None
        matcher = state.matcher = state.matcher or self._grammars.begin(state.new.spec.grammar)
        known = rows.token_ids[row, state.num_prompt_tokens + matcher.num_consumed : position]
        matcher.consume(known.tolist())
        return matcher
