"""The built wheel, installed outside the tree: every program starts, and the engine generates."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

from release.commands import UV, run
from release.errors import ReleaseError

PACKAGES = ("stoker", "stoker_common", "stoker_operator", "stoker_engine", "stoker_gateway")

#: One request of OpenAI's batch format, for this number of tokens.
NUM_TOKENS = 4
REQUEST = {
    "custom_id": "capital",
    "method": "POST",
    "url": "/v1/completions",
    "body": {
        "model": "gemma-3-270m",
        "prompt": "The capital of France is",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    },
}


def check(wheel: Path, version: str, source: Path, folder: Path) -> None:
    """Install a wheel into an environment of its own and run its commands.

    The environment finds the dependencies in this process's environment, whose own, editable Stoker it does not load:
    a folder that a .pth file names is searched, but the .pth files in it are not read.

    Args:
        source: the sources from which it was built, for manifests and the CustomResourceDefinition.
        folder: an empty folder outside the sources, where the commands run.
    """
    environment = folder / "environment"
    python = environment / "bin/python"
    run(UV, "venv", "--python", sys.executable, environment)
    run(UV, "pip", "install", "--python", python, "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def stoker(*words: str | Path) -> str:
        return run(environment / "bin/stoker", *words, cwd=folder, environment={"PYTHONPATH": ""})

    where = f"import {', '.join(PACKAGES)}; print({', '.join(f'{name}.__file__' for name in PACKAGES)}, sep='\\n')"
    for file in run(python, "-c", where, cwd=folder, environment={"PYTHONPATH": ""}).split():
        if not Path(file).is_relative_to(environment):
            raise ReleaseError(f"{file} was imported instead of the wheel's")
    if (reported := stoker("--version").strip()) != f"stoker {version}":
        raise ReleaseError(f"`stoker --version` prints {reported!r}, not the version {version}")
    manifest = source / "examples/01-demo.yaml"
    for words in (("plan", "-f", manifest), ("render", "-f", manifest), ("gateway", "--help"), ("operator", "--help")):
        stoker(*words)
    stoker("crd", "--check", "--output", source / "crds/inferenceendpoints.stoker.dev.yaml")
    (folder / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n")
    stoker(
        "run-batch", "--model", "demo://gemma-3-270m", "--device", "cpu", "--max-model-len", "512",
        "--input-file", folder / "requests.jsonl", "--output-file", folder / "responses.jsonl",
    )  # fmt: skip
    body = json.loads((folder / "responses.jsonl").read_text())["response"]["body"]
    # The tokens themselves depend on the processor.
    if body["usage"]["completion_tokens"] != NUM_TOKENS or not body["choices"][0]["text"].strip():
        raise ReleaseError(f"the demo model did not generate {NUM_TOKENS} tokens: {body}")
