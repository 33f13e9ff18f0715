"""Data sets of benchmarks: prompts, and the number of tokens to generate for each.

random              tokens drawn uniformly from the vocabulary; nothing is shared, except an optional prefix
prefix_repetition   a few random prefixes, each followed by many random suffixes, to measure the prefix cache
sharegpt            real conversations: first question, length of the first answer (a JSON list, or JSON Lines)
custom              JSON Lines with "prompt" and, without --custom-output-len, "output_tokens"
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stoker_common.errors import ArgumentError
from stoker_engine.contract.argv import flag

_NAMES = ("random", "prefix_repetition", "sharegpt", "custom")

#: vLLM's filter of ShareGPT, in tokens: minimum of the prompt and of the answer, maximum of the prompt, maximum of both
#: together.
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


_FORMATS = (
    'Formats: --dataset-name custom reads JSON lines with "prompt" and "output_tokens"; --dataset-name sharegpt reads '
    'a JSON list, or JSON lines, of objects with "conversations", whose turns have "value"'
)


@dataclass(frozen=True)
class DatasetArgs:
    """Which requests a benchmark sends."""

    dataset_name: str = flag("kind of requests", "random", choices=_NAMES)
    dataset_path: str | None = flag("file of a sharegpt or custom data set", None)
    num_prompts: int = flag("number of requests", 1000)
    seed: int = flag("random seed", 0)
    random_input_len: int = flag("random: tokens of a prompt, after its prefix", 1024)
    random_output_len: int = flag("random: tokens to generate", 128)
    random_range_ratio: float = flag("random: lengths vary by a factor of 1 ± this ratio; 0: all are equal", 0.0)
    random_prefix_len: int = flag("random: tokens of the prefix that all prompts share", 0)
    prefix_repetition_prefix_len: int = flag("prefix_repetition: tokens of a prefix", 256)
    prefix_repetition_suffix_len: int = flag("prefix_repetition: tokens of a suffix", 256)
    prefix_repetition_num_prefixes: int = flag("prefix_repetition: number of prefixes", 10)
    prefix_repetition_output_len: int = flag("prefix_repetition: tokens to generate", 128)
    sharegpt_output_len: int | None = flag("sharegpt: tokens to generate; default: those of the file's answer", None)
    custom_output_len: int | None = flag("custom: tokens to generate; default: the line's output_tokens", None)
    disable_shuffle: bool = flag("sharegpt, custom: keep the order of the file", False)

    def __post_init__(self) -> None:
        if self.dataset_name in ("sharegpt", "custom") and self.dataset_path is None:
            raise ArgumentError("--dataset-path", f"is required with --dataset-name {self.dataset_name}")
        if self.num_prompts < 1:
            raise ArgumentError("--num-prompts", f"must be at least 1, got {self.num_prompts}")
        if not 0 <= self.random_range_ratio < 1:
            raise ArgumentError("--random-range-ratio", f"must be from 0 to below 1, got {self.random_range_ratio}")


@dataclass(frozen=True)
class Sample:
    """One request.

    Attributes:
        prompt: token ids.
        output_len: number of tokens to generate.
    """

    prompt: list[int]
    output_len: int


class Words(Protocol):
    """The part of a tokenizer that data sets use."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ...


def load_dataset(args: DatasetArgs, tokenizer: Words, vocab_size: int) -> list[Sample]:
    """Return the requests that `args` describe; equal arguments give equal requests.

    Args:
        vocab_size: size of the model's vocabulary; random token ids are below this and the tokenizer's size.

    Raises:
        ArgumentError: the file cannot be read, has another format, or contains no usable request.
    """
    chance = random.Random(args.seed)
    num_token_ids = min(vocab_size, tokenizer.vocab_size)
    if args.dataset_name == "random":
        return _random(args, chance, num_token_ids)
    if args.dataset_name == "prefix_repetition":
        return _prefix_repetition(args, chance, num_token_ids)
    samples = _sharegpt(args, tokenizer) if args.dataset_name == "sharegpt" else _custom(args, tokenizer)
    if not samples:
        raise ArgumentError("--dataset-path", f"{args.dataset_path} contains no usable request")
    if not args.disable_shuffle:
        chance.shuffle(samples)
    return [samples[i % len(samples)] for i in range(args.num_prompts)]  # repeats samples if there are too few


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
    samples = []
    for location, conversation in _conversations(args):
        messages = _field(args, location, conversation, "conversations", "conversation") or []
        if not isinstance(messages, list):
            raise _other_format(args, f'{location}: "conversations" must be a list')
        values = [
            _field(args, f"{location}, turn {index}", message, "value") for index, message in enumerate(messages[:2], 1)
        ]
        if len(values) < 2:
            continue
        question, answer = values
        if not isinstance(question, str) or not isinstance(answer, str):
            raise _other_format(args, f'{location}: each turn\'s "value" must be text')
        prompt, answer_tokens = tokenizer.encode(question), tokenizer.encode(answer)
        length = args.sharegpt_output_len or len(answer_tokens)
        if _SHORTEST <= len(prompt) <= _LONGEST_PROMPT and length >= _SHORTEST and len(prompt) + length <= _LONGEST:
            samples.append(Sample(prompt, length))
    return samples


def _conversations(args: DatasetArgs) -> Iterator[tuple[str, Any]]:
    """Yield (location, conversation) of a file that is a JSON list, a single conversation, or JSON Lines."""
    text = _read(args)
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        yield from _lines(args, text)
        return
    for number, entry in enumerate(whole if isinstance(whole, list) else [whole], start=1):
        yield f"entry {number}", entry


def _custom(args: DatasetArgs, tokenizer: Words) -> list[Sample]:
    samples = []
    for location, entry in _lines(args, _read(args)):
        prompt = _field(args, location, entry, "prompt")
        if not isinstance(prompt, str):
            raise _other_format(args, f'{location}: "prompt" must be text')
        length = args.custom_output_len
        if length is None:
            if "output_tokens" not in entry:
                raise _other_format(args, f'{location} has no "output_tokens"; add it, or give --custom-output-len')
            length = _positive(entry["output_tokens"])
            if length is None:
                raise _other_format(args, f'{location}: "output_tokens" must be a whole number of at least 1')
        samples.append(Sample(tokenizer.encode(prompt), length))
    return samples


def _lines(args: DatasetArgs, text: str) -> Iterator[tuple[str, Any]]:
    """Yield (location, parsed JSON) of each line that is not blank."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _other_format(args, f"line {number} is not JSON ({str(error)[:100]})") from error
        yield f"line {number}", entry


def _field(args: DatasetArgs, location: str, entry: Any, *names: str) -> Any:
    """Return the value of the first of the fields `names` that exists.

    Raises:
        ArgumentError: none exists, or the entry is not an object.
    """
    if not isinstance(entry, dict):
        raise _other_format(args, f"{location} is not a JSON object")
    found = [name for name in names if name in entry]
    if not found:
        field_names = ", ".join(str(name)[:30] for name in list(entry)[:8]) or "none"
        raise _other_format(args, f'{location} has no "{names[0]}"; its fields are: {field_names}')
    return entry[found[0]]


def _positive(value: Any) -> int | None:
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if number >= 1 else None


def _other_format(args: DatasetArgs, problem: str) -> ArgumentError:
    return ArgumentError("--dataset-path", f"{args.dataset_path}: {problem}. {_FORMATS}")


def _read(args: DatasetArgs) -> str:
    """Return the file's text, without a byte-order mark."""
    assert args.dataset_path is not None
    try:
        return Path(args.dataset_path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ArgumentError("--dataset-path", f"cannot read {args.dataset_path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(
            "--dataset-path",
            f"{args.dataset_path} is not UTF-8 (byte {error.start:,} is 0x{error.object[error.start]:02x}); convert "
            "it, for example by iconv -f LATIN1 -t UTF-8",
        ) from error
