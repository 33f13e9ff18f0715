"""Watches the cluster with kopf, and passes events to the controller.

Of kopf's handlers of objects, only `on.event` is used. Others keep state in the objects' annotations and finalizers,
but an endpoint belongs to its user and must be deletable while no operator runs.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import kopf
from kopf._cogs.structs.references import Insights  # an argument type of `kopf.operator`; not exported

from stoker_operator.cluster.informer import Watched
from stoker_operator.cluster.kube import Kube, KubeError, client_configuration
from stoker_operator.manager.controller import Controller
from stoker_operator.manager.relisting import OnEvent
from stoker_operator.objects.owner import MANAGED_BY
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.policy.policy import Policy
from stoker_operator.settings import Settings
from stoker_operator.workloads.composition import ONE_DEPLOYMENT, Composition

logger = logging.getLogger(__name__)

#: Name of the threads that run optional watches.
_THREAD: Final = "watch"


class KindGoneError(KubeError):
    """The API server lacks a watched kind."""


def login(*, settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo:
    """Return the address and credentials with which `Kube` connects.

    `kopf.login_via_client` returns a pod's cluster, even if there is a kubeconfig.

    Raises:
        KubeError: there is no usable kubeconfig and no pod's service account.
    """
    configuration = client_configuration()
    scheme, _space, token = (configuration.get_api_key_with_prefix("BearerToken") or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        trust_env=settings.networking.trust_env,
    )


def registry(
    controller: Controller, watched: Iterable[Watched], ending: asyncio.Event, failure: list[KubeError | OSError]
) -> kopf.OperatorRegistry:
    """Return kopf's handlers. SIGTERM and SIGINT set `ending`; `failure` gets the error of a failed start."""
    handlers = kopf.OperatorRegistry()
    kopf.on.login(registry=handlers)(login)

    @kopf.on.startup(registry=handlers)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        quieten(settings, watched)
        try:
            await controller.start()
        except (KubeError, OSError) as error:
            # kopf would retry in a half-started process. The process ends instead, and its container is restarted.
            failure.append(error)
            raise kopf.PermanentError(str(error)) from error
        # Replace kopf's own signal handlers, which are set by now and fail at a second signal.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ending.set)

    @kopf.on.cleanup(registry=handlers)
    async def stop(**_: Any) -> None:
        await controller.stop()

    _register_watches(handlers, watched, controller.on_event)
    return handlers


def _register_watches(handlers: kopf.OperatorRegistry, watched: Iterable[Watched], on_event: OnEvent) -> None:
    def handler(kind: str) -> Any:
        async def seen(event: kopf.RawEvent, **_: Any) -> None:
            on_event(kind, event["type"], event["object"])

        return seen

    for each in watched:
        kopf.on.event(each.group, each.version, each.plural, registry=handlers)(handler(each.kind))


class OptionalWatches:
    """Watches of kinds that a cluster may lack or lose. Each runs a separate kopf in a thread.

    kopf accepts no kinds after its start, and ends when a watched kind is removed.

    Args:
        settings: the operator's settings, with the namespaces to watch.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, watched: tuple[Watched, ...], on_event: OnEvent, ended: Callable[[], None]) -> None:
        """Watch these kinds.

        Args:
            watched: the kinds.
            on_event: called with each event, in the watch's thread.
            ended: called when the watch ends, for example because a kind was removed, in the watch's thread.
        """
        thread = threading.Thread(target=self._watch, args=(watched, on_event, ended), name=_THREAD, daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """End all watches. Blocks for at most 5 seconds per watch."""
        self._ending.set()
        for thread in self._threads:
            thread.join(5)

    def _watch(self, watched: tuple[Watched, ...], on_event: OnEvent, ended: Callable[[], None]) -> None:
        handlers = kopf.OperatorRegistry()
        kopf.on.login(registry=handlers)(login)

        @kopf.on.startup(registry=handlers)
        async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
            quieten(settings, watched)

        _register_watches(handlers, watched, on_event)
        _filter_kopf()
        logger.info("the cluster has %s; watching them", ", ".join(each.plural for each in watched))
        try:
            _run(handlers, watched, self._settings, self._ending)
        except Exception as error:
            logger.warning("stopped watching %s: %s", ", ".join(each.plural for each in watched), error)
        ended()


def _filter_kopf() -> None:
    for name in ("running", "orchestration"):
        logging.getLogger(f"kopf._core.reactor.{name}").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether to keep a log record of kopf.

    Two kinds of records are dropped. One states that the thread of a watch handles no signals; the main thread does.
    The other has an exception that ends a watch; the exception is also raised, and logged with its cause.
    """
    return not record.exc_info and (record.threadName != _THREAD or "OS signals" not in record.getMessage())


def quieten(settings: kopf.OperatorSettings, watched: Iterable[Watched]) -> None:
    """Restrict kopf to watching: it writes nothing, and requests only objects that are handled."""
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    # Renew watches periodically, so that a connection that died silently is noticed.
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    selector = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())
    for each in watched:
        if each.managed_only:
            name = f"{each.plural}.{each.group}" if each.group else each.plural
            settings.watching.label_selectors[name] = selector


def _removed_kinds(kube: Kube, watched: Iterable[Watched]) -> list[str]:
    """Return the plural names of the watched kinds that the API server lacks; none if a request fails."""
    try:
        return [each.plural for each in watched if not kube.serves(each.kind)]
    except KubeError:
        return []


def run(
    settings: Settings,
    kube: Kube,
    catalogue: Catalogue,
    policy: Policy,
    composition: Composition = ONE_DEPLOYMENT,
) -> None:
    """Run the operator until SIGTERM or SIGINT. See `Controller` for the arguments.

    Raises:
        KindGoneError: the API server lacks a watched kind.
        KubeError: the cluster could not be listed.
        OSError: listening on an address failed.
    """
    optional = OptionalWatches(settings)
    controller = Controller(settings, kube, catalogue, policy, optional.begin, composition)
    failure: list[KubeError | OSError] = []
    ending = asyncio.Event()
    watched = controller.watched()
    _filter_kopf()
    try:
        _run(registry(controller, watched, ending, failure), watched, settings, ending)
    except Exception:
        if failure:
            raise failure[0] from None
        removed_kinds = _removed_kinds(kube, watched)
        if removed_kinds:
            raise KindGoneError(404, f"the cluster no longer has {', '.join(removed_kinds)}") from None
        raise
    finally:
        optional.stop()


def _run(
    handlers: kopf.OperatorRegistry,
    watched: Iterable[Watched],
    settings: Settings,
    ending: asyncio.Event | threading.Event,
) -> None:
    # Not asyncio.run: kopf is stopped in the middle of its watches, and asyncio.run would close nested asynchronous
    # generators concurrently, which raises errors. kopf leaves no task and no connection behind.
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_operate(handlers, watched, settings, ending))
    except asyncio.CancelledError:
        pass
    finally:
        loop.close()


async def _operate(
    handlers: kopf.OperatorRegistry,
    watched: Iterable[Watched],
    settings: Settings,
    ending: asyncio.Event | threading.Event,
) -> None:
    identity: Any = "stoker"  # kopf would derive one from the user's name, and a container's user has none
    insights = Insights()
    running = asyncio.ensure_future(
        kopf.operator(
            stop_flag=ending,
            registry=handlers,
            insights=insights,
            standalone=True,
            identity=identity,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
        )
    )
    looked = asyncio.ensure_future(insights.ready_resources.wait())
    await asyncio.wait((running, looked), return_when=asyncio.FIRST_COMPLETED)
    if looked.done():
        # kopf discovers kinds only once, and would never watch a kind that was missing at that time.
        known = {(each.group, each.version, each.plural) for each in insights.watched_resources}
        missing = [each.plural for each in watched if (each.group, each.version, each.plural) not in known]
        if missing:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise KindGoneError(404, f"the cluster does not have {', '.join(missing)}")
    looked.cancel()
    await running
