"""An operator that kills itself right before or right after a write, without cleanup.

The operator is unchanged; only the writing methods of its client are wrapped. Processes are forked from a fork server
that has imported everything, so that a start takes a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

#: Modules that the fork server preloads.
_LOADED = ["stoker_operator.cli.operator", "stoker_operator.manager.handlers"]


class Death(NamedTuple):
    """Moment at which an operator dies.

    Attributes:
        moment: ``before`` the request is sent, or ``after`` it was answered.
        write: the first write of this name, such as ``apply Deployment``; empty for the first write of all.
    """

    moment: str
    write: str = ""

    def __str__(self) -> str:
        return f"{self.moment} it did {self.write or 'anything'}"


class Life:
    """An operator process for one namespace, or all.

    Args:
        kubeconfig: the cluster and credentials; the same for all lives of a test run.
        namespace: namespace to watch; empty for all.
        log: file to which its log is appended; its writes are in the same path with the suffix ``.writes``.
        death: when it dies; None if it runs until it is stopped.
        options: additional command line arguments.
    """

    def __init__(
        self, kubeconfig: Path, namespace: str, log: Path, death: Death | None = None, options: Sequence[str] = ()
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_LOADED)
        self.log, self.death = log, death
        log.touch()  # a process that is killed early writes none
        words = ["--health-address=127.0.0.1:0", *([f"--namespace={namespace}"] if namespace else []), *options]
        self.process: BaseProcess = context.Process(target=_live, args=(kubeconfig, words, log, death), daemon=True)
        self.process.start()

    @property
    def writes(self) -> list[str]:
        """Return its writes so far, such as ``apply Deployment``."""
        return _written(self.log).read_text().splitlines() if _written(self.log).exists() else []

    def died(self, timeout: float = 0) -> bool:
        """Return whether it killed itself, within `timeout` seconds."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            return False
        assert self.process.exitcode == -signal.SIGKILL, f"code {self.process.exitcode}:\n{self.log.read_text()}"
        return True

    def kill(self) -> None:
        """Kill it, if it runs."""
        self.process.kill()
        self.process.join()


def _written(log: Path) -> Path:
    return log.with_suffix(".writes")


def _live(kubeconfig: Path, words: list[str], log: Path, death: Death | None) -> None:
    stderr = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(stderr, stream)
    from kubernetes import config

    for module in (config, config.kube_config):  # both read KUBECONFIG on import
        module.KUBE_CONFIG_DEFAULT_LOCATION = str(kubeconfig)
    from stoker_operator.cli.operator import main
    from stoker_operator.cluster.kube import Kube

    for name in ("apply", "create", "replace", "patch", "delete"):
        setattr(Kube, name, _crashing(getattr(Kube, name), name, log, death))
    sys.exit(main(words))


def _crashing(method: Callable[..., Any], verb: str, log: Path, death: Death | None) -> Callable[..., Any]:
    """Wrap a method of the client: record its writes except dry runs, and kill the process at `death`."""

    def write(kube: Any, about: Any, *args: Any, **options: Any) -> Any:
        if options.get("dry_run"):
            return method(kube, about, *args, **options)
        kind = about if isinstance(about, str) else about["kind"]
        subresource = args[1] if verb == "apply" and len(args) > 1 else ""
        name = f"{verb} {kind}/{subresource}" if subresource else f"{verb} {kind}"
        due = death is not None and death.write in ("", name)
        if due and death and death.moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = method(kube, about, *args, **options)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        with _written(log).open("a") as written:
            written.write(f"{name}\n")
        return answer

    return write
