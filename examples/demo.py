"""`make demo`: serve the demo manifest on this machine, and send requests to it."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
from openai import OpenAI

HERE = Path(__file__).parent
MANIFEST = HERE / "01-demo.yaml"
START_TIMEOUT = 300.0  # seconds; the first start assembles the model and converts its tokenizer


def main() -> int:
    """Run the demo. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--once", action="store_true", help="exit after the answers instead of continuing to serve")
    options = parser.parse_args()
    if not 0 < options.port < 65536:
        parser.error(f"--port must be 1 to 65535, not {options.port}")
    url = f"http://127.0.0.1:{options.port}"
    if is_in_use(options.port):
        print(f"port {options.port} is in use; choose another one: make demo PORT={options.port + 1}", file=sys.stderr)
        return 2

    command = [sys.executable, "-m", "stoker", "up", "-f", str(MANIFEST), "--port", str(options.port)]
    print("$ stoker up -f", MANIFEST.relative_to(HERE.parent), "--port", options.port, flush=True)
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    answering = threading.Lock()
    log = threading.Thread(target=print_log, args=(server, answering))
    log.start()
    try:
        if not wait_until_healthy(server, url):
            return 1
        with answering:
            talk(url)
        print(f"\nTry it yourself:\n\n{curl_line(url)}\n", flush=True)
        if options.once:
            return 0
        print("Serving until Ctrl-C.", flush=True)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        log.join()


def is_in_use(port: int) -> bool:
    """Return whether a program accepts connections at a port of this machine; it would answer instead of the demo."""
    with socket.socket() as connection:
        connection.settimeout(2)
        return connection.connect_ex(("127.0.0.1", port)) == 0


def print_log(server: subprocess.Popen[str], answering: threading.Lock) -> None:
    """Print the server's log as it is written, but not within an answer."""
    assert server.stderr is not None
    for line in server.stderr:
        with answering:
            print(line, end="", file=sys.stderr, flush=True)


def wait_until_healthy(server: subprocess.Popen[str], url: str) -> bool:
    """Wait until ``/health`` returns 200. Return False if the server exits or `START_TIMEOUT` passes before that."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if server.poll() is not None:
            print(f"the server exited with code {server.returncode}", file=sys.stderr)
            return False
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200 and server.poll() is None:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    print(f"the server was not healthy within {START_TIMEOUT:.0f} s", file=sys.stderr)
    return False


def talk(url: str) -> None:
    """Stream a completion and a chat to standard output."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id

    prompt = "The capital of France is"
    print(f"\n--- completion ({model}) ---\n{prompt}", end="", flush=True)
    for part in client.completions.create(model=model, prompt=prompt, max_tokens=40, temperature=0, stream=True):
        if part.choices:
            print(part.choices[0].text, end="", flush=True)

    question = "What is a steam engine?"
    print(f"\n\n--- chat ---\nuser: {question}\nassistant:", end="", flush=True)
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=60,
        temperature=0,
        stop=["\nUser:"],
        stream=True,
    ):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print(flush=True)


def curl_line(url: str) -> str:
    """Return a command for a further request."""
    body = '{"model": "gemma-3-270m", "prompt": "Once upon a time", "max_tokens": 40}'
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"


if __name__ == "__main__":
    sys.exit(main())
