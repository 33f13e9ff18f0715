"""Shapes of the steps for which CUDA graphs are captured.

Steps of decodes have a graph for several numbers of sequences. Steps with chunks of prompts or with drafts have one for
several numbers of tokens, each of which may belong to any sequence:

    decodes    1, 2, 4, 8 … sequences        1 token of each
    chunks     8, 16, 32 … 2,048 tokens      of up to as many sequences, decodes among them

More tokens take so long that the device does not wait for the host's launches.

Sampling has graphs of its own, for several numbers of rows of logits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: Numbers of sequences of decodes.
_SEQUENCES: Final = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960, 1024),
)
#: Numbers of tokens of steps with chunks. They are few because each takes time to capture, and memory.
_TOKENS: Final = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
#: Numbers of rows of logits of the graphs of sampling, and the maximum bytes of these logits.
_SAMPLED_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LOGITS_BYTES: Final = 256 << 20
#: Tokens per decode of the graphs for the shortest sequences, and the factor from one length to the next.
_SHORTEST, _LONGER = 1024, 4


class StepShape(NamedTuple):
    """Shape of steps.

    Attributes:
        tokens: number of tokens.
        sequences: number of sequences, at most `tokens`.
        has_chunks: whether some of them may compute several tokens.
        has_adapters: whether some of them may use adapters.
    """

    tokens: int
    sequences: int
    has_chunks: bool
    has_adapters: bool = False

    def has_room(self, step: StepShape) -> bool:
        """Whether a graph of this shape can compute a step."""
        return self[2:] == step[2:] and self.tokens >= step.tokens and self.sequences >= step.sequences


def captured_shapes(max_num_seqs: int, max_num_batched_tokens: int, has_adapters: bool = False) -> list[StepShape]:
    """Return the shapes to capture, those with the most tokens first.

    Args:
        has_adapters: whether sequences may use adapters; steps with and without adapters then have different graphs.
    """
    decodes = [(size, size, False) for size in _up_to(min(max_num_seqs, max_num_batched_tokens), _SEQUENCES)]
    chunks = [(size, min(size, max_num_seqs), True) for size in _up_to(max_num_batched_tokens, _TOKENS)]
    kinds = (False, True) if has_adapters else (False,)
    return sorted((StepShape(*shape, kind) for shape in (*decodes, *chunks) for kind in kinds), reverse=True)


def planned_lengths(shape: StepShape, cache_tokens: int, max_model_len: int) -> list[int]:
    """Return the lengths of decodes, in tokens, for each of which a shape is captured, the shortest first.

    The total length of all sequences is limited to about twice the cache's tokens: only shared prefixes allow more than
    the cache's tokens. Steps with chunks have only the shortest and the longest length.

    Args:
        cache_tokens: number of tokens that the KV cache holds.
    """
    longest = min(max_model_len, -(-2 * cache_tokens // shape.sequences))
    lengths = []
    length = _SHORTEST
    while 2 * length <= longest:
        lengths.append(length)
        length *= _LONGER
    return [*lengths[: 1 if shape.has_chunks else None], longest]


def sampled_rows(vocab_size: int, max_rows: int, element_bytes: int) -> list[int]:
    """Return the numbers of rows of logits for which sampling is captured, ascending.

    Args:
        max_rows: maximum number of rows in a step.
        element_bytes: bytes of one element of the head's results.
    """
    in_memory = _LOGITS_BYTES // logits_row_bytes(vocab_size, element_bytes)
    return _up_to(max(1, min(max_rows, in_memory)), _SAMPLED_ROWS)


def logits_row_bytes(vocab_size: int, element_bytes: int) -> int:
    """Return the bytes of a row of logits in a graph of sampling: the head's results, and these in float32."""
    return vocab_size * (element_bytes + 4)


def _up_to(limit: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the sizes below `limit`, and `limit` itself or the largest size."""
    largest = min(limit, sizes[-1])
    return [*(size for size in sizes if size < largest), largest]
