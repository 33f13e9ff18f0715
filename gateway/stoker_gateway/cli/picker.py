"""``python -m stoker_gateway.cli.picker FOLDER PARENT NUMBER …``: the picker's process of ``stoker gateway …``.

FOLDER is Envoy's folder. PARENT is the id of the parent process; the kernel kills this process when the parent ends.
NUMBER is the number of earlier pickers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stoker_common.subprocesses.lifeline import die_with
from stoker_gateway.cli import cluster_flags, gateway
from stoker_gateway.runtime import process


async def _run(folder: Path, is_restart: bool, command: gateway.Command) -> int:
    cluster = None
    if command.namespace is not None:
        holds_external = command.settings.external_scaler is not None
        cluster = cluster_flags.cluster(command.namespace, holds_external=holds_external)
    await process.run(
        command.settings, folder, command.model_registry, command.keys, cluster, is_restart, command.names
    )
    return 0


def main(argv: list[str]) -> int:
    """Run until SIGTERM or SIGINT, and return the exit code: 1 if the picker cannot serve."""
    folder, parent, number, *arguments = argv
    die_with(int(parent))
    return gateway.exit_code_of(_run(Path(folder), number != "0", gateway.parse_command(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
