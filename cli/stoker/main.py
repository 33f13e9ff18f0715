"""The `stoker` command: finds the command that was typed, loads that one and no other.

Commands are entry points of the group ``stoker.commands``: the operator and the engine bring their own, and so
may any package that is installed beside them. A command is a function that takes the words after its name
and returns the exit code. Loading lazily keeps `stoker --help` instant, and lets an image that has the
dependencies of one half only run the commands of that half.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version

GROUP = "stoker.commands"

# How `stoker --help` describes a command; written here because the command itself would have to be imported.
SUMMARIES = {
    "serve": "serve a model behind an OpenAI-compatible API",
    "chat": "talk to a served model",
    "run-batch": "answer an OpenAI batch file without a server",
    "quantize": "quantize a model's weights and save them",
    "build-kernels": "compile a model's GPU kernels beforehand",
    "bench": "measure a server, or the engine without one",
    "up": "run an InferenceEndpoint manifest on this machine, without a cluster",
    "plan": "show how an InferenceEndpoint manifest is spread over its GPUs",
    "render": "print the Kubernetes objects that a manifest becomes",
    "crd": "print the InferenceEndpoint CustomResourceDefinition",
    "operator": "run the Kubernetes operator",
    "gateway": "put one address before the servers of many models",
    "keys": "make, show and revoke the keys of a gateway's clients",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 is a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(commands))
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"stoker {version('stoker')}")
        return 0
    if arguments[0] not in commands:
        print(unknown(arguments[0], commands), file=sys.stderr)
        return 2
    entry = commands[arguments[0]]
    try:
        # The call is inside as well: a command may load what is heavy only once it is sure to run.
        return int(entry.load()(arguments[1:]) or 0)
    except ModuleNotFoundError as error:
        if not entry.extras or is_ours(error.name, entry):
            raise
        print(missing(entry, error.name), file=sys.stderr)
        return 2


def usage(commands: dict[str, EntryPoint]) -> str:
    """The text of ``stoker --help``: our commands in reading order, then those of other packages."""
    known = [name for name in SUMMARIES if name in commands]
    width = max(map(len, commands), default=0)
    lines = ["usage: stoker COMMAND ...", "", "commands:"]
    for name in known + sorted(set(commands) - set(known)):
        lines.append(f"  {name:<{width}}  {SUMMARIES.get(name, f'from {commands[name].module}')}")
    return "\n".join([*lines, "", "stoker COMMAND --help shows its options; stoker --version shows the version"])


def unknown(word: str, commands: dict[str, EntryPoint]) -> str:
    """The message for a command that does not exist."""
    similar = difflib.get_close_matches(word, commands, n=1)
    hint = f"did you mean `stoker {similar[0]}`?" if similar else "see `stoker --help`"
    return f"stoker: no command {word!r}; {hint}"


def missing(entry: EntryPoint, module: str | None) -> str:
    """What is said of a command whose extra is not installed."""
    project = entry.dist.name if entry.dist else "stoker"
    install = f"pip install '{project}[{','.join(entry.extras)}]'"
    return f"stoker {entry.name} needs the Python package {module!r}, which is not installed:\n  {install}"


def is_ours(module: str | None, entry: EntryPoint) -> bool:
    """Whether a module that was not found belongs to us: that is a bug to see, not an extra to install."""
    if module is None:
        return True
    packages = {"stoker", "stoker_common", "stoker_engine", "stoker_operator", entry.module.partition(".")[0]}
    return module.partition(".")[0] in packages
