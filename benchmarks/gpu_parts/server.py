"""A server with the big model: the parts of its start, and the latency of a token under load."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys

from startup import running

from gpu_parts.context import Context
from gpu_parts.figures import Figure
from gpu_parts.models import Size

_COMPILED = re.compile(r"(\d+) kernels were compiled")


def measure(context: Context) -> None:
    """Record the figures. Earlier parts have compiled the kernels; the title of the start says if some were not."""
    scale, name = context.scale, context.scale.big
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    flags = [f"--{option.replace('_', '-')}={value}" for option, value in scale.options.items()]
    words = ["serve", str(context.model(name)), f"--port={port}", f"--device={scale.device}", *flags]
    words += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    settings = f"bf16, {' '.join([*flags, *words[-2:]])}, otherwise defaults"
    with running([sys.executable, "-P", "-m", "stoker", *words], port) as server:
        compiled = _COMPILED.search(server.log())
        count = int(compiled[1]) if compiled else 0
        warm = "no kernel was compiled" if count == 0 else f"{count} kernels were compiled, so it is not a warm start"
        title = f"{name}, start of a server until /ready"
        context.add(Figure(f"server/{name}/start", title, server.ready_s, "s", f"{warm}; {settings}"))
        for part, seconds in server.parts().items():
            context.add(Figure(f"server/{name}/start/{part}", f"start: {part}", seconds, "s", "a part of the start"))
        _load(context, port, settings)


def _load(context: Context, port: int, settings: str) -> None:
    name, (rate, count, prompt, output) = context.scale.big, context.scale.served
    results = context.folder / "bench-serve.json"
    words = ["bench", "serve", f"--base-url=http://127.0.0.1:{port}", f"--request-rate={rate}"]
    words += [f"--num-prompts={count}", f"--random-input-len={prompt}", f"--random-output-len={output}"]
    words += ["--disable-tqdm", f"--output-json={results}", f"--tokenizer={context.model(name)}"]
    subprocess.run([sys.executable, "-P", "-m", "stoker", *words], check=True)
    found = json.loads(results.read_text())
    at = f"{rate:g} requests/s, {count} requests of {prompt} + {output} tokens; {settings}"
    for metric, label in (("tpot", "time per output token"), ("ttft", "time to first token"), ("itl", "token gap")):
        for statistic in ("mean", "p99"):
            is_step = (metric, statistic) == ("tpot", "mean")
            read = Size(name).weights("bf16") if is_step else 0.0  # a step reads at least the weights
            value = found[f"{statistic}_{metric}_ms"]
            key = f"server/{name}/{metric}" + ("/p99" if statistic == "p99" else "")
            context.add(Figure(key, f"{name}, server: {label}, {statistic}", value, "ms", at, read))
    value = found["output_throughput"]
    context.add(Figure(f"server/{name}/throughput", f"{name}, server, output", value, "tok/s", at))
