"""The `stoker` command: finds, loads and runs the requested subcommand.

Commands are entry points of the group ``stoker.commands``, defined by Stoker and any other installed package. A command
is a function that takes the arguments after its name and returns the exit code. Lazy loading keeps `stoker --help`
fast, and lets an image with the dependencies of one component run that component's commands.
"""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version

GROUP = "stoker.commands"

# Stoker's packages, which are installed together.
PACKAGES = ("stoker", "stoker_common", "stoker_engine", "stoker_operator", "stoker_gateway")

# Descriptions in `stoker --help`. They are here so that the commands need not be imported.
SUMMARIES = {
    "serve": "serve a model behind an OpenAI-compatible API",
    "chat": "talk to a served model",
    "run-batch": "answer an OpenAI batch file without a server",
    "quantize": "quantize a model's weights and save them",
    "build-kernels": "compile a model's GPU kernels in advance",
    "bench": "measure a server, or the engine without a server",
    "up": "run an InferenceEndpoint manifest on this machine, without a cluster",
    "plan": "show how a model can be placed on accelerators, and what fits",
    "render": "print the Kubernetes objects of an InferenceEndpoint manifest",
    "crd": "print the InferenceEndpoint CustomResourceDefinition",
    "operator": "run the Kubernetes operator",
    "gateway": "serve many models at one address, each from its own servers",
    "keys": "create, list and revoke the API keys of a gateway's clients",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for a wrong command line or a missing package, 130 if interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without characters such as × must not fail a command
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
        # The call is inside `try`, because a command may import its dependencies only when it runs.
        return int(entry.load()(arguments[1:]) or 0)
    except KeyboardInterrupt:  # also while the command's modules are imported
        return 130
    except ModuleNotFoundError as error:
        if not entry.extras or is_ours(error.name, entry):
            raise
        print(missing(entry, error.name), file=sys.stderr)
        return 2


def usage(commands: dict[str, EntryPoint]) -> str:
    """Return the text of ``stoker --help``: Stoker's commands in the order of `SUMMARIES`, then other commands."""
    known = [name for name in SUMMARIES if name in commands]
    width = max(map(len, commands), default=0)
    lines = ["usage: stoker COMMAND ...", "", "commands:"]
    for name in known + sorted(set(commands) - set(known)):
        lines.append(f"  {name:<{width}}  {SUMMARIES.get(name, f'from {commands[name].module}')}")
    return "\n".join([*lines, "", "stoker COMMAND --help shows its options; stoker --version shows the version"])


def unknown(word: str, commands: dict[str, EntryPoint]) -> str:
    """Return the message for a command that does not exist."""
    similar = difflib.get_close_matches(word, commands, n=1)
    hint = f"did you mean `stoker {similar[0]}`?" if similar else "see `stoker --help`"
    return f"stoker: no command {word!r}; {hint}"


def missing(entry: EntryPoint, module: str | None) -> str:
    """Return the message for a command whose extra is not installed."""
    project = entry.dist.name if entry.dist else "stoker"
    extras = ",".join(entry.extras)
    if project == "stoker":  # no package index has it yet
        install = f"pip install -c constraints.txt '.[{extras}]'   (in a checkout of Stoker's repository)"
    else:
        install = f"pip install '{project}[{extras}]'"
    return f"stoker {entry.name} needs the Python package {module!r}, which is not installed:\n  {install}"


def is_ours(module: str | None, entry: EntryPoint) -> bool:
    """Return whether the missing module is unknown, or part of Stoker or the command's package."""
    if module is None:
        return True
    return module.partition(".")[0] in {*PACKAGES, entry.module.partition(".")[0]}
