"""CPU time of the server's process per streamed token, compared with vLLM's.

    python benchmarks/front_end.py [--clients 64] [--tokens 256] [--rounds 3] [--peers vllm|none]
                                   [--api chat|completions]

Each server loads the same tiny model with random weights, so the engine is fast and the server's process has most of
the work. All clients stream at once, each over its own connection. CPU time is that of the process that serves HTTP,
without its children: in both engines it decodes tokens, writes events and sends them. Time per token counts the
request's other work, too; with 256 tokens a request that is little. Clients only count events. Installing vLLM takes
some minutes and 7 GB in ``$STOKER_BENCH_CACHE``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from cpu.engines import vllm
from cpu.environments import cache_folder
from machine import cpu_name
from rich.console import Console
from rich.table import Table
from serving import Cost, is_ready
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

START_S = 300
#: A chat without a system prompt, as most templates write it.
TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}<|assistant|>"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Server:
    """Server that is ready."""

    name: str
    pid: int
    port: int


@dataclass(frozen=True)
class Round:
    """Result of one round.

    Attributes:
        cpu_s: CPU seconds of the process that serves HTTP.
        events: number of events with text, without those that only start or end a stream.
    """

    tokens: int
    events: int
    seconds: float
    cpu_s: float


def tiny_model() -> Path:
    """Return the folder of a model with two small layers and a vocabulary of 2,000 words; generated on first use."""
    folder = cache_folder() / "models" / "tiny-words-1"
    if (folder / "tokenizer.json").is_file():
        return folder
    rng = random.Random(0)
    tokens = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = {"Ġ" + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 8))) for _ in range(4000)}
    tokens += sorted(words - set(tokens))[: 2048 - len(tokens)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight[:257] = 0  # so that most tokens are words, and few are parts of a character
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def stoker(model: Path, clients: int, port: int) -> list[str]:
    """Return the command of our server."""
    return [
        sys.executable, "-m", "stoker", "serve", str(model), f"--port={port}", "--served-model-name=m",
        f"--kv-cache-memory-bytes={1 << 28}", f"--max-num-seqs={clients}",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


def peer(model: Path, clients: int, port: int) -> list[str]:
    """Return the command of vLLM's server."""
    return [
        str(Path(vllm.installed(cache_folder())).with_name("vllm")), "serve", str(model), "--port", f"{port}",
        "--served-model-name", "m", "--max-model-len", "2048", "--max-num-seqs", f"{clients}", "--dtype", "bfloat16",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


COMMANDS = {"stoker": stoker, "vllm": peer}


@contextmanager
def serve(name: str, model: Path, clients: int) -> Iterator[Server]:
    """Run a server until the end of the context."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    log = cache_folder() / "logs" / f"front-end-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | (vllm.ENV if name == "vllm" else {})
    with (
        log.open("w") as output,
        subprocess.Popen(
            COMMANDS[name](model, clients, port), stdout=output, stderr=output, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            if not is_ready(port, process, START_S):
                raise SystemExit(f"{name} did not start: {log}")
            yield Server(name, process.pid, port)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


async def stream(port: int, api: str, number: int, tokens: int) -> int:
    """Stream one request, and return the number of events with text."""
    text = f"request {number}"
    asked = {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
    body = {"model": "m", "max_tokens": tokens, "ignore_eos": True, "stream": True, **asked}
    data = json.dumps(body).encode()
    head = f"POST {PATHS[api]} HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server answered {status.decode()} {(await reader.read(2000)).decode()}")
    marks, events, rest, ended = (b'"content":"', b'"text":"'), 0, b"", False
    while received := await reader.read(1 << 16):
        *whole, rest = (rest + received).split(b"\n\n")
        events += sum(b"data: {" in event and any(mark in event for mark in marks) for event in whole)
        ended = ended or any(b"data: [DONE]" in event for event in whole)
        if any(b'"error":' in event for event in whole):
            break
    writer.close()
    if not ended:
        raise SystemExit(f"a stream of the server at port {port} broke off after {events} events")
    return events - (api == "chat")  # the first event of a chat has the role


async def measure(server: Server, api: str, clients: int, tokens: int, turn: int) -> Round:
    """Run `clients` streams at once."""
    before, began = Cost.of([server.pid]).cpu_s, time.perf_counter()
    events = await asyncio.gather(
        *(stream(server.port, api, turn * clients + number, tokens) for number in range(clients))
    )
    seconds = time.perf_counter() - began
    return Round(clients * tokens, sum(events), seconds, Cost.of([server.pid]).cpu_s - before)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", choices=("vllm", "none"), default="vllm")
    parser.add_argument("--api", choices=tuple(PATHS), default="chat")
    options = parser.parse_args()
    names = ["stoker"] if options.peers == "none" else ["stoker", "vllm"]
    model = tiny_model()
    found: dict[str, list[Round]] = {name: [] for name in names}
    with ExitStack() as stack:
        servers = [stack.enter_context(serve(name, model, options.clients)) for name in names]
        for turn in range(options.rounds + 1):
            for server in servers:
                result = asyncio.run(measure(server, options.api, options.clients, options.tokens, turn))
                if turn:  # the first round is the warm-up
                    found[server.name].append(result)
    title = f"{options.clients} {options.api} streams of {options.tokens} tokens; {cpu_name()}"
    table = Table("server", "CPU µs a token", "CPU µs an event", "tokens an event", "tokens/s", title=title)
    for name, rounds in found.items():
        table.add_row(
            name,
            f"{median(each.cpu_s / each.tokens for each in rounds) * 1e6:.0f}",
            f"{median(each.cpu_s / each.events for each in rounds) * 1e6:.0f}",
            f"{median(each.tokens / each.events for each in rounds):.2f}",
            f"{median(each.tokens / each.seconds for each in rounds):.0f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
