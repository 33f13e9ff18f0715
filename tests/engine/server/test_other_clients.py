"""Other clients than OpenAI's, used like their users do, with the real engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_openai import ChatOpenAI, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def chat(address: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{address}/v1", api_key="none", model="tiny", temperature=0, max_tokens=12)  # type: ignore


def test_langchain_chats_are_equal_whole_streamed_and_batched(chat: ChatOpenAI) -> None:
    messages = [("system", "be brief"), ("human", "the quick fox")]
    whole = chat.invoke(messages)
    assert isinstance(whole.content, str)
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 12
    chunks = list(chat.stream(messages))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    batch = chat.batch([messages, "the lazy dog"])
    assert batch[0].content == whole.content


def test_langchain_gets_logprobs(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2, seed=3, stop=["~"]).invoke("over")
    content = answer.response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def _astream(chat: ChatOpenAI) -> str:
    return "".join([str(chunk.content) async for chunk in chat.astream("the quick fox")])


def test_langchain_async_streams_equal_whole_answers(chat: ChatOpenAI) -> None:
    import asyncio

    assert asyncio.run(_astream(chat)) == chat.invoke("the quick fox").content


def test_langchain_completions_are_equal_whole_streamed_and_batched(address: str) -> None:
    llm = OpenAI(base_url=f"{address}/v1", api_key="none", model="tiny", temperature=0, max_tokens=8)  # type: ignore
    text = llm.invoke("the lazy dog")
    assert "".join(llm.stream("the lazy dog")) == text
    assert [generations[0].text for generations in llm.generate(["the lazy dog"] * 3).generations] == [text] * 3


TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: " "
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""

QUESTIONS = [
    {"question": "the quick brown", "choices": ["fox", "lazy dog", "over"], "answer": 0},
    {"question": "the fox jumps", "choices": ["again and again", "over the dog"], "answer": 1},
    {"question": "and", "choices": ["again", "the", "dog"], "answer": 2},
]


@pytest.mark.slow
def test_lm_eval_scores_as_transformers_does(
    address: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``lm_eval --model local-completions`` on a custom task: log-likelihoods of all choices."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    lm_eval = pytest.importorskip("lm_eval", reason="pip install 'lm_eval[api]'")
    from lm_eval.tasks import TaskManager

    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny_choice.yaml").write_text(TASK.format(data=data))
    result: Any = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny",
            "base_url": f"{address}/v1/completions",
            "tokenizer": str(tiny_llama),
            "num_concurrent": 2,
            "max_length": 256,
        },
        tasks=["tiny_choice"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    samples = result["samples"]["tiny_choice"]
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        question = sample["doc"]
        scores = [float(response[0][0]) for response in sample["resps"]]
        context = tokenizer(question["question"]).input_ids
        for choice, loglikelihood in zip(question["choices"], scores, strict=True):
            tokens = tokenizer(f"{question['question']} {choice}").input_ids
            with torch.inference_mode():
                logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            expected = sum(float(logprobs[at - 1, tokens[at]]) for at in range(len(context), len(tokens)))
            assert math.isclose(loglikelihood, expected, abs_tol=1e-3)
    assert 0 <= result["results"]["tiny_choice"]["acc,none"] <= 1
