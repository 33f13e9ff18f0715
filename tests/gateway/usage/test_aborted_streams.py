"""Streams of a real engine whose clients disconnect are charged for the generated tokens, by the engine's own count."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ...engine.server.test_serve_command import serving
from ...support.engine.tiny_models import save_model, tiny_llama_model
from ...support.waiting import until_async
from .answering import behind

PROMPT = "a prompt of some words"
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 400},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 200, "n": 2, "ignore_eos": True},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 400, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 400},
}
#: An event with text of the answer, hence with at least one token.
TEXT = re.compile(rb'"(?:content|text|delta)": ?"[^"]')


@pytest.mark.slow
def test_disconnected_clients_are_charged_for_generated_tokens(tmp_path: Path) -> None:
    chance = random.Random(0)

    async def main(url: str) -> None:
        async with behind(None, (url.removeprefix("http://"),)) as at, aiohttp.ClientSession() as client:

            async def counted(name: str) -> float:
                async with client.get(f"{url}/metrics") as answer:
                    families = text_string_to_metric_families(await answer.text())
                return sum(sample.value for each in families for sample in each.samples if sample.name == name)

            aborted = received = 0
            for number in range(16):
                path = list(ASKED)[number % 4]
                before = await counted("vllm:generation_tokens_total"), await counted("vllm:prompt_tokens_total")
                body = {"model": "m", "stream": True, **ASKED[path]}
                num_received = 0
                async with client.post(at.url + path, json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    for _ in range(chance.choice((1, 3, 10, 40))):
                        num_received += bool(TEXT.search(await answer.content.readuntil(b"\n\n")))
                    answer.close()
                ended = await at.next_end()
                async with asyncio.timeout(60):

                    async def holds() -> bool:
                        return not (await counted("vllm:num_requests_running"))

                    await until_async(holds)
                generated = await counted("vllm:generation_tokens_total") - before[0]
                aborted += ended.aborted  # else it was complete, and still being sent
                assert not ended.tokens.estimated
                # The client has read `num_received`; the engine continues until it notices the disconnect.
                assert num_received <= ended.tokens.output <= generated
                assert ended.tokens.prompt == await counted("vllm:prompt_tokens_total") - before[1]
                received += num_received
            assert aborted >= 4 and received >= 16

    model = save_model(tmp_path / "tiny", tiny_llama_model())
    template = tmp_path / "template"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with serving(model, "--served-model-name=m", f"--chat-template={template}") as (_, url):
        asyncio.run(main(url))
