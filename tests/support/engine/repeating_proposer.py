"""A proposer of draft tokens for tests of speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence


class RepeatingProposer:
    """Proposes what followed the last token before, or else repeats it: some drafts are accepted, most are not."""

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        last = token_ids[-1]
        for index in range(len(token_ids) - 2, -1, -1):
            if token_ids[index] == last:
                return list(token_ids[index + 1 : index + 1 + max_tokens])
        return [last] * (max_tokens // 2)
