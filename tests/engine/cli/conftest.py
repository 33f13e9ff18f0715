"""A server of a tiny model, started once like users do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

RUN = "import sys; from stoker_engine.cli.{module} import main; sys.exit(main(sys.argv[1:]))"

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def run(module: str, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-c", RUN.format(module=module), *words],
        capture_output=True,
        text=True,
        timeout=120,
        input=stdin,
    )


@contextmanager
def serving(model: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``stoker serve`` until it serves; yield the process and the server's URL."""
    argv = [str(model), "--host=127.0.0.1", "--port=0", "--num-gpu-blocks-override=256", *words]
    program = [sys.executable, "-c", RUN.format(module="serve"), *argv]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next((line.split()[-1] for line in process.stderr if "serving " in line), None)
            assert url is not None, "the server ended before it served"
            yield process, url
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[str]:
    with serving(tiny_llama, "--served-model-name=tiny", f"--chat-template={CHAT_TEMPLATE}") as (_, url):
        yield url


@pytest.fixture(scope="session")
def command() -> object:
    return run


@pytest.fixture(scope="session")
def serve() -> object:
    return serving
