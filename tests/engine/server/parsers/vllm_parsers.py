"""Runs vLLM's parsers in a Python with vLLM: cases on standard input, results on standard output."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer(markers: list[str]) -> Any:
    """Return a tokenizer whose tokens are bytes and the markers."""
    vocabulary = {character: id for id, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(markers)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def main() -> None:
    """Print results in the order of the cases; an error is printed as text."""
    job = json.load(sys.stdin)
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    tools = importlib.import_module("vllm.tool_parsers").ToolParserManager
    reasoning = importlib.import_module("vllm.reasoning").ReasoningParserManager
    tokens = tokenizer(job["markers"])
    answers = []
    for kind, name, text, offered in job["cases"]:
        chat = {"messages": [{"role": "user", "content": "Well?"}], "model": "m", "tools": offered or None}
        request = protocol.ChatCompletionRequest(**chat)
        try:
            if kind == "reasoning":
                answers.append(list(reasoning.get_reasoning_parser(name)(tokens).extract_reasoning(text, request)))
            else:
                found = tools.get_tool_parser(name)(tokens, request.tools).extract_tool_calls(text, request)
                calls = [[call.function.name, call.function.arguments] for call in found.tool_calls]
                answers.append([found.content, calls])
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
