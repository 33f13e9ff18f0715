"""An operator that dies by its own hand right before or right after a write, without any notice.

The operator is the product's, untouched: what is wrapped is its client's methods that write, in this process alone.
Lives are forked from one server process that has imported everything already, so that one costs a fraction of a second.
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

#: What an operator imports until it works.
_LOADED = ["stoker_operator.cli.operator", "stoker_operator.manager.handlers"]


class Death(NamedTuple):
    """When an operator dies.

    Attributes:
        moment: ``before`` a request is sent, or ``after`` it was answered.
        write: the first write of that name, as in ``apply Deployment``; empty: the first of all.
    """

    moment: str
    write: str = ""

    def __str__(self) -> str:
        return f"{self.moment} it did {self.write or 'anything'}"


class Life:
    """An operator that looks after one namespace, or all, from its start to its death.

    Args:
        kubeconfig: the cluster, and who it is there. The same one for all lives of a test run.
        namespace: what it looks after; empty: all.
        log: what it says is added to this file; what it wrote is in the same file with ``.writes``.
        death: when it dies; None: when it is stopped.
        options: more words of its command line.
    """

    def __init__(
        self, kubeconfig: Path, namespace: str, log: Path, death: Death | None = None, options: Sequence[str] = ()
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_LOADED)
        self.log, self.death = log, death
        log.touch()  # who is killed before it says anything has said nothing
        words = ["--health-address=127.0.0.1:0", *([f"--namespace={namespace}"] if namespace else []), *options]
        self.process: BaseProcess = context.Process(target=_live, args=(kubeconfig, words, log, death), daemon=True)
        self.process.start()

    @property
    def writes(self) -> list[str]:
        """What it has written so far, each as in ``apply Deployment``."""
        return _written(self.log).read_text().splitlines() if _written(self.log).exists() else []

    def died(self, timeout: float = 0) -> bool:
        """Whether it is dead, as it was to be, within `timeout` seconds."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            return False
        assert self.process.exitcode == -signal.SIGKILL, f"code {self.process.exitcode}:\n{self.log.read_text()}"
        return True

    def kill(self) -> None:
        """Ends it now, if it lives."""
        self.process.kill()
        self.process.join()


def _written(log: Path) -> Path:
    return log.with_suffix(".writes")


def _live(kubeconfig: Path, words: list[str], log: Path, death: Death | None) -> None:
    stderr = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(stderr, stream)
    from kubernetes import config

    for module in (config, config.kube_config):  # which read KUBECONFIG when they were imported
        module.KUBE_CONFIG_DEFAULT_LOCATION = str(kubeconfig)
    from stoker_operator.cli.operator import main
    from stoker_operator.cluster.kube import Kube

    for name in ("apply", "create", "replace", "patch", "delete"):
        setattr(Kube, name, _crashing(getattr(Kube, name), name, log, death))
    sys.exit(main(words))


def _crashing(method: Callable[..., Any], verb: str, log: Path, death: Death | None) -> Callable[..., Any]:
    """A method of the client that notes down what it does, and ends the process where that is due."""

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
