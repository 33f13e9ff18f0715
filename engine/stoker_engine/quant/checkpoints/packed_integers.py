"""Integers of 1 to 8 bits packed into int32 words, from the low bits up.

dense    a unit of 32 integers fills `bits` words; an integer may straddle two words
padded   no integer straddles two words: for example, a word holds 10 integers of 3 bits, and has 2 unused bits
"""

from __future__ import annotations

import torch


def words_of(numbers: int, bits: int, padded: bool) -> int:
    """Return the number of words that hold `numbers` integers."""
    return -(-numbers // (32 // bits)) if padded else -(-numbers * bits // 32)


def words_around(numbers: slice, bits: int, padded: bool, words: int) -> tuple[slice, int]:
    """Return which of a row's `words` words contain the integers `numbers`, and the index of the first integer in
    these words."""
    if padded:
        each = 32 // bits
        return slice(numbers.start // each, words_of(numbers.stop, bits, padded)), numbers.start // each * each
    unit = numbers.start // 32
    return slice(unit * bits, min(words, -(-numbers.stop // 32) * bits)), unit * 32


def unpack(words: torch.Tensor, bits: int, padded: bool) -> torch.Tensor:
    """Unpack int32 [..., words] → uint8 [..., integers]: all integers that the words can hold, also unused ones at the
    end. Missing words of an incomplete last unit count as zeros."""
    assert words.dtype == torch.int32
    if 8 % bits == 0:
        # contiguous() would keep the stride of a dimension of size 1, with which view() fails.
        return _in_pieces(words.clone(memory_format=torch.contiguous_format).view(torch.uint8), bits, 8 // bits)
    if padded:
        return _in_pieces(words, bits, 32 // bits)
    units = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits)).unflatten(-1, (-1, bits))
    numbers = torch.empty(*units.shape[:-1], 32, dtype=torch.uint8)
    mask = (1 << bits) - 1
    for index in range(32):
        word, first = divmod(index * bits, 32)
        number = units[..., word] >> first
        if (over := first + bits - 32) > 0:
            number = number & ((1 << (bits - over)) - 1) | (units[..., word + 1] << (bits - over))
        numbers[..., index] = number & mask
    return numbers.flatten(-2)


def _in_pieces(pieces: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack `count` integers from each element of `pieces`."""
    numbers = torch.empty(*pieces.shape, count, dtype=torch.uint8)
    for index in range(count):
        numbers[..., index] = (pieces >> bits * index) & ((1 << bits) - 1)
    return numbers.flatten(-2)
