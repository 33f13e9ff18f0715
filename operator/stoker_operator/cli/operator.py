"""``stoker operator``: watches InferenceEndpoints and runs the pods they ask for."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from stoker_operator.api.violation import Refused
from stoker_operator.kube import Kube, KubeError
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.settings import Settings

CRD_MISSING = (
    "InferenceEndpoint is not known to this cluster; install it with the Helm chart, or with "
    "`stoker crd | kubectl apply -f -`"
)


def main(argv: list[str]) -> int:
    """Runs the command until SIGTERM or SIGINT; 1: there is no cluster to work in, 2: a wrong command line."""
    settings, log_level = parse(argv)
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # Every event delivered and every probe answered is told of; what becomes of them is for us to tell.
    for chatter in ("kopf.objects", "kopf.activities", "aiohttp.access"):
        logging.getLogger(chatter).setLevel(logging.WARNING)
    try:
        catalogue = Catalogue.load(settings.catalogue)
        kube = Kube.connect()
        if not kube.serves_endpoints():
            print(f"stoker operator: {CRD_MISSING}", file=sys.stderr)
            return 1
    except Refused as error:
        print(f"stoker operator: {error}", file=sys.stderr)
        return 2
    except KubeError as error:
        print(f"stoker operator: {error}", file=sys.stderr)
        return 1
    from stoker_operator import handlers  # kopf takes a second to load, which a wrong flag need not wait for

    handlers.run(settings, kube, catalogue)
    return 0


def parse(argv: list[str]) -> tuple[Settings, str]:
    """The settings, and the log level."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="stoker operator", description="Run the Kubernetes operator.")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="look after this one; repeatable (default: all)",
    )
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="laid over the built-in accelerator catalogue")
    parser.add_argument(
        "--resync-seconds",
        type=float,
        default=defaults.resync_seconds,
        help="how often every endpoint is looked at, whatever happened (default: %(default)s)",
    )
    parser.add_argument(
        "--health-address",
        default=defaults.health_address,
        metavar="HOST:PORT",
        help="where /healthz answers (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: %(default)s)"
    )
    options = parser.parse_args(argv)
    settings = Settings(
        namespaces=tuple(options.namespace),
        resync_seconds=options.resync_seconds,
        catalogue=options.catalogue,
        health_address=options.health_address,
    )
    return settings, options.log_level
