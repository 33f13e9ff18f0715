"""What a benchmark asks: prompts and how much is to be generated for each.

random              tokens drawn evenly from the vocabulary: nothing is shared, save a prefix if asked for
prefix_repetition   a few random prefixes, each followed by many random suffixes: what a prefix cache is for
sharegpt            conversations people had: first question, length of the first answer (a JSON file)
custom              JSON lines with "prompt" and, if it is not for --custom-output-len to say, "output_tokens"
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stoker_engine.contract.argv import flag
from stoker_engine.contract.errors import ArgumentError

_NAMES = ("random", "prefix_repetition", "sharegpt", "custom")

#: As vLLM filters ShareGPT: what is too short shows nothing, what is too long is rare.
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


@dataclass(frozen=True)
class DatasetArgs:
    """Which requests are made."""

    dataset_name: str = flag("kind of requests", "random", choices=_NAMES)
    dataset_path: str | None = flag("file of a sharegpt or custom data set", None)
    num_prompts: int = flag("number of requests", 1000)
    seed: int = flag("of all that is drawn", 0)
    random_input_len: int = flag("random: tokens of a prompt, after its prefix", 1024)
    random_output_len: int = flag("random: tokens to generate", 128)
    random_range_ratio: float = flag("random: lengths are drawn from 1 ± this share of them; 0: all the same", 0.0)
    random_prefix_len: int = flag("random: tokens that all prompts begin with", 0)
    prefix_repetition_prefix_len: int = flag("prefix_repetition: tokens of a prefix", 256)
    prefix_repetition_suffix_len: int = flag("prefix_repetition: tokens after it", 256)
    prefix_repetition_num_prefixes: int = flag("prefix_repetition: different prefixes", 10)
    prefix_repetition_output_len: int = flag("prefix_repetition: tokens to generate", 128)
    sharegpt_output_len: int | None = flag("sharegpt: tokens to generate; default: as the file's answer", None)
    custom_output_len: int | None = flag("custom: tokens to generate; default: the line's own output_tokens", None)
    disable_shuffle: bool = flag("sharegpt, custom: take the file's requests in order", False)

    def __post_init__(self) -> None:
        if self.dataset_name in ("sharegpt", "custom") and self.dataset_path is None:
            raise ArgumentError("--dataset-path", f"--dataset-name {self.dataset_name} needs a file")
        if self.num_prompts < 1:
            raise ArgumentError("--num-prompts", f"must be at least 1, got {self.num_prompts}")
        if not 0 <= self.random_range_ratio < 1:
            raise ArgumentError("--random-range-ratio", f"must be from 0 to below 1, got {self.random_range_ratio}")


@dataclass(frozen=True)
class Sample:
    """One request.

    Attributes:
        prompt: its tokens.
        output_len: tokens to generate.
    """

    prompt: list[int]
    output_len: int


class Words(Protocol):
    """What a data set needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`text` as token ids."""
        ...


def load_dataset(args: DatasetArgs, tokenizer: Words, vocab_size: int) -> list[Sample]:
    """The requests that `args` describe; the same ones each time.

    Args:
        vocab_size: random tokens are drawn below it.

    Raises:
        ArgumentError: the file cannot be read, or holds too little.
    """
    chance = random.Random(args.seed)
    most = min(vocab_size, tokenizer.vocab_size)
    if args.dataset_name == "random":
        return _random(args, chance, most)
    if args.dataset_name == "prefix_repetition":
        return _prefix_repetition(args, chance, most)
    samples = _sharegpt(args, tokenizer) if args.dataset_name == "sharegpt" else _custom(args, tokenizer)
    if not samples:
        raise ArgumentError("--dataset-path", f"{args.dataset_path} holds no usable request")
    if not args.disable_shuffle:
        chance.shuffle(samples)
    return [samples[i % len(samples)] for i in range(args.num_prompts)]  # oversampled where there are too few


def _tokens(chance: random.Random, count: int, vocab_size: int) -> list[int]:
    return [chance.randrange(vocab_size) for _ in range(count)]


def _random(args: DatasetArgs, chance: random.Random, vocab_size: int) -> list[Sample]:
    prefix = _tokens(chance, args.random_prefix_len, vocab_size)

    def drawn(length: int) -> int:
        spread = int(length * args.random_range_ratio)
        return max(1, chance.randint(length - spread, length + spread))

    return [
        Sample(prefix + _tokens(chance, drawn(args.random_input_len), vocab_size), drawn(args.random_output_len))
        for _ in range(args.num_prompts)
    ]


def _prefix_repetition(args: DatasetArgs, chance: random.Random, vocab_size: int) -> list[Sample]:
    count = args.prefix_repetition_num_prefixes
    prefixes = [_tokens(chance, args.prefix_repetition_prefix_len, vocab_size) for _ in range(count)]
    samples = [
        Sample(
            prefixes[i % count] + _tokens(chance, args.prefix_repetition_suffix_len, vocab_size),
            args.prefix_repetition_output_len,
        )
        for i in range(args.num_prompts)
    ]
    chance.shuffle(samples)
    return samples


def _sharegpt(args: DatasetArgs, tokenizer: Words) -> list[Sample]:
    try:
        conversations = json.loads(_read(args))
        pairs = [
            (turns[0]["value"], turns[1]["value"])
            for conversation in conversations
            if len(turns := conversation.get("conversations") or conversation.get("conversation") or []) >= 2
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError("--dataset-path", f"{args.dataset_path} is no ShareGPT file: {error}") from error
    samples = []
    for question, answer in pairs:
        prompt, said = tokenizer.encode(question), tokenizer.encode(answer)
        length = args.sharegpt_output_len or len(said)
        if _SHORTEST <= len(prompt) <= _LONGEST_PROMPT and length >= _SHORTEST and len(prompt) + length <= _LONGEST:
            samples.append(Sample(prompt, length))
    return samples


def _custom(args: DatasetArgs, tokenizer: Words) -> list[Sample]:
    samples = []
    for number, line in enumerate(_read(args).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry: dict[str, Any] = json.loads(line)
            length = args.custom_output_len or int(entry["output_tokens"])
            samples.append(Sample(tokenizer.encode(entry["prompt"]), length))
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                "--dataset-path",
                f'line {number} of {args.dataset_path} is no JSON object with "prompt" and "output_tokens" '
                f"(or give --custom-output-len): {error!r}",
            ) from error
    return samples


def _read(args: DatasetArgs) -> str:
    assert args.dataset_path is not None
    try:
        return Path(args.dataset_path).read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError("--dataset-path", f"cannot read {args.dataset_path}: {error.strerror}") from error
