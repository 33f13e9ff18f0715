"""Keeps the webhook served under a certificate that the API server trusts.

    Secret  ◄── issue ─── leader ── caBundle ──►  ValidatingWebhookConfiguration
       │                                                     │
       └──► every replica loads it            API server ◄───┘  trusts whom it names

All replicas serve the one certificate in the Secret; the leader makes it. A new one is announced before it is stored:
the API server trusts it by the time a replica presents it, and goes on trusting the older one, which other replicas may
present for a while yet. Two that consider themselves leader cannot both store one, since the Secret's
`resourceVersion` decides, and the one that failed announces the other's in its next round.

Where another controller owns the certificate (cert-manager), the Secret is only read and the configuration is not
touched.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import ssl
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from stoker_operator.admission.certificates import Certificate, UnusableCertificate, issue
from stoker_operator.cluster.kube import Kube, KubeError, Object
from stoker_operator.process.background_loop import OwnThread
from stoker_operator.settings import WebhookSettings

#: Seconds between two looks: while there is no certificate to serve, and afterwards.
_SOON, _LATER = 1.0, 60.0

logger = logging.getLogger(__name__)


class CertificateKeeper:
    """Looks after the certificate from `start` to `stop`.

    Args:
        kube: where the Secret and the webhook's configuration are.
        settings: what they are called.
        leading: whether this replica may write.
        on_load: called with each certificate that is served from now on.
        now: the time, with its zone.

    Attributes:
        tls: what a server is to use; what it presents changes while it runs.
    """

    def __init__(
        self,
        kube: Kube,
        settings: WebhookSettings,
        *,
        leading: Callable[[], bool],
        on_load: Callable[[Certificate], None] = lambda _: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube, self._settings = kube, settings
        self._leading, self._on_load, self._now = leading, on_load, now
        self._served: Certificate | None = None
        self._context: ssl.SSLContext | None = None
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._thread = OwnThread("certificate")
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Called at the beginning of each handshake, also where the client names no server.
        self.tls.sni_callback = self._choose_certificate

    @property
    def loaded(self) -> bool:
        """Whether there is a certificate to serve."""
        return self._context is not None

    async def start(self) -> None:
        """Begins to look after it."""
        self._task = asyncio.create_task(self._run(), name="certificate keeper")

    def wake(self) -> None:
        """Looks now: what was another replica's task may have become ours."""
        self._woken.set()

    async def stop(self) -> None:
        """Ends looking after it; what is served is served on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.close()

    async def _run(self) -> None:
        reported_trouble = ""
        while True:
            self._woken.clear()
            trouble = ""
            try:
                trouble = await self._round()
            except Exception:
                logger.exception("the webhook's certificate: this is a bug in the operator")
            if trouble and trouble != reported_trouble:  # once, however often it is found to be so
                logger.warning("%s", trouble)
            reported_trouble = trouble
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LATER if self.loaded else _SOON):
                    await self._woken.wait()

    async def _round(self) -> str:
        """Sees to it that the right certificate is served; what is in the way. A certificate that cannot be renewed yet
        is served as long as it lives."""
        trouble = ""
        if not self._settings.external and self._leading():
            try:
                trouble = await self._thread.call(self._renew_if_due)
            except (KubeError, UnusableCertificate) as error:
                trouble = f"the webhook's certificate cannot be looked after: {error}"
                if isinstance(error, KubeError) and error.status == 409:
                    self.wake()  # another one was faster: what it made is to be announced, and at once
        try:
            certificate = await self._thread.call(self._read_certificate)
            if certificate != self._served:
                self._load(certificate)
        except (KubeError, UnusableCertificate) as error:
            trouble = trouble or f"the webhook has no certificate to serve: {error}"
        return trouble

    def _read_certificate(self) -> Certificate:
        """The certificate to serve.

        Raises:
            KubeError: the API server could not be reached.
            UnusableCertificate: there is none.
        """
        certificate = _read(self._secret())
        certificate.check(self._now())
        return certificate

    def _renew_if_due(self) -> str:
        """Makes a certificate where one is due, and writes its authority into the API server's configuration. Returns
        why the webhook is not called; empty where it is.

        Raises:
            KubeError: the API server could not be reached, or refuses.
            UnusableCertificate: there is no place for a certificate.
        """
        secret = self._secret()
        older = b""
        try:
            certificate = _read(secret)
            older = certificate.authorities
            certificate.check_ours(self._settings.hosts, self._now())
        except UnusableCertificate as why:
            certificate = issue(self._settings.hosts, self._now(), older)
            trouble = self._announce(certificate.authorities)
            self._kube.replace({**secret, "data": _data(certificate)})
            logger.info("made a new certificate for the webhook: %s", why)
            return trouble
        return self._announce(certificate.authorities)

    def _announce(self, authorities: bytes) -> str:
        name = self._settings.configuration
        configuration = self._kube.get("ValidatingWebhookConfiguration", "", name)
        if configuration is None:
            return f"the webhook is not called: there is no ValidatingWebhookConfiguration {name}"
        bundle = base64.b64encode(authorities).decode()
        operations = [
            {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
            for index, webhook in enumerate(configuration.get("webhooks") or ())
            if webhook["clientConfig"].get("caBundle") != bundle
        ]
        if operations:
            # Indexes are about this version of it.
            version = configuration["metadata"]["resourceVersion"]
            test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
            self._kube.patch("ValidatingWebhookConfiguration", "", name, [test, *operations])
        return ""

    def _secret(self) -> Object:
        namespace, name = self._settings.namespace, self._settings.secret
        secret = self._kube.get("Secret", namespace, name)
        if secret is None:
            remedy = "let cert-manager make it again" if self._settings.external else "make it again with helm upgrade"
            last = self._served
            until = f"; replicas that run serve the last one until {last.expires:%Y-%m-%d}" if last else ""
            raise UnusableCertificate(f"there is no Secret {namespace}/{name}: {remedy}{until}")
        return secret

    def _load(self, certificate: Certificate) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:  # only its owner can read it
            chain, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
            chain.write_bytes(certificate.chain)
            key.write_bytes(certificate.key)
            try:
                context.load_cert_chain(chain, key)
            except ssl.SSLError as error:
                raise UnusableCertificate(f"it cannot be served: {error}") from None
        self._context, self._served = context, certificate
        self._on_load(certificate)
        logger.info("the webhook serves a certificate that expires on %s", f"{certificate.expires:%Y-%m-%d}")

    def _choose_certificate(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> int | None:
        if self._context is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._context
        return None


def _read(secret: Object) -> Certificate:
    data = secret.get("data") or {}
    try:
        chain, key, authorities = (base64.b64decode(data.get(name) or "") for name in ("tls.crt", "tls.key", "ca.crt"))
    except binascii.Error as error:
        raise UnusableCertificate(f"the Secret holds something else: {error}") from None
    if not chain:
        raise UnusableCertificate("the Secret is empty")
    return Certificate(chain, key, authorities)


def _data(certificate: Certificate) -> dict[str, str]:
    parts = {"tls.crt": certificate.chain, "tls.key": certificate.key, "ca.crt": certificate.authorities}
    return {name: base64.b64encode(content).decode() for name, content in parts.items()}
