"""Issues and renews the webhook's certificate, and makes the API server trust it.

    Secret  ◄── issue ─── leader ── caBundle ──►  ValidatingWebhookConfiguration
       │                                                     │
       └──► every replica loads it            API server ◄───┘  trusts these CAs

The leader issues one certificate and stores it in the Secret; all replicas serve it. The CA of a new certificate
is written to the `caBundle` before the certificate is stored, so that the API server trusts it before a replica
presents it. The bundle keeps the older CA, because other replicas may still present the older certificate. If two
replicas consider themselves the leader, only one can store a certificate, because the write requires the Secret's
`resourceVersion`; the other one writes that certificate's CAs to the `caBundle` in its next round.

If another controller (cert-manager) owns the certificate, the keeper only reads the Secret.
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

#: Seconds between two rounds: until a certificate is loaded, and afterwards.
_SOON, _LATER = 1.0, 60.0

logger = logging.getLogger(__name__)


class CertificateKeeper:
    """Issues, renews and loads the certificate between `start` and `stop`.

    Args:
        kube: client of the API server.
        settings: the webhook's settings, with the names of the Secret and the configuration.
        leading: returns whether this replica is the leader and may write.
        on_load: called with each certificate when it is loaded.
        now: returns the current time, with its zone.

    Attributes:
        tls: the server's TLS context; the certificate that it presents changes over time.
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
        # Called at the start of each handshake, also if the client sends no server name.
        self.tls.sni_callback = self._choose_certificate

    @property
    def loaded(self) -> bool:
        """Whether a certificate has been loaded."""
        return self._context is not None

    async def start(self) -> None:
        """Start to check the certificate periodically, in rounds."""
        self._task = asyncio.create_task(self._run(), name="certificate keeper")

    def wake(self) -> None:
        """Start the next round without a pause, for example because this replica has become the leader."""
        self._woken.set()

    async def stop(self) -> None:
        """Stop the rounds. `tls` keeps presenting the last loaded certificate."""
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
                logger.exception("could not check or renew the webhook's certificate: this is a bug in the operator")
            if trouble and trouble != reported_trouble:  # not logged in every round
                logger.warning("%s", trouble)
            reported_trouble = trouble
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LATER if self.loaded else _SOON):
                    await self._woken.wait()

    async def _round(self) -> str:
        """Load the Secret's certificate; the leader first renews it if it is due and not external.

        Returns the problem, or an empty string. A certificate is served until another one is loaded.
        """
        trouble = ""
        if not self._settings.external and self._leading():
            try:
                trouble = await self._thread.call(self._renew_if_due)
            except (KubeError, UnusableCertificate) as error:
                trouble = f"the webhook's certificate cannot be checked or renewed: {error}"
                if isinstance(error, KubeError) and error.status == 409:
                    self.wake()  # the Secret has changed: write its CAs to the caBundle now
        try:
            certificate = await self._thread.call(self._read_certificate)
            if certificate != self._served:
                self._load(certificate)
        except (KubeError, UnusableCertificate) as error:
            trouble = trouble or f"the webhook's certificate cannot be loaded: {error}"
        return trouble

    def _read_certificate(self) -> Certificate:
        """Return the Secret's certificate.

        Raises:
            KubeError: the request to the API server failed.
            UnusableCertificate: there is no usable certificate.
        """
        certificate = _read(self._secret())
        certificate.check(self._now())
        return certificate

    def _renew_if_due(self) -> str:
        """Issue a certificate if one is due, and write the certificate's CAs into the webhook's configuration.

        Returns:
            a warning if the webhook's configuration does not exist; otherwise empty.

        Raises:
            KubeError: a request to the API server failed.
            UnusableCertificate: there is no Secret for the certificate.
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
            logger.info("issued a new certificate for the webhook: %s", why)
            return trouble
        return self._announce(certificate.authorities)

    def _announce(self, authorities: bytes) -> str:
        """Write the CAs into the webhook's configuration. Returns a warning if it does not exist; otherwise empty."""
        try:
            return self._write_authorities(authorities)
        except KubeError as error:
            if error.status != 422:  # the status if the configuration changed between the read and the write
                raise
        return self._write_authorities(authorities)

    def _write_authorities(self, authorities: bytes) -> str:
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
            # The indexes in the paths are valid for this version only.
            version = configuration["metadata"]["resourceVersion"]
            test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
            self._kube.patch("ValidatingWebhookConfiguration", "", name, [test, *operations])
        return ""

    def _secret(self) -> Object:
        namespace, name = self._settings.namespace, self._settings.secret
        secret = self._kube.get("Secret", namespace, name)
        if secret is None:
            remedy = "let cert-manager recreate it" if self._settings.external else "recreate it with helm upgrade"
            last = self._served
            until = f"; running replicas serve the last one, valid until {last.expires:%Y-%m-%d}" if last else ""
            raise UnusableCertificate(f"there is no Secret {namespace}/{name}: {remedy}{until}")
        return secret

    def _load(self, certificate: Certificate) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:  # only its owner can read the folder
            chain, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
            chain.write_bytes(certificate.chain)
            key.write_bytes(certificate.key)
            try:
                context.load_cert_chain(chain, key)
            except ssl.SSLError as error:
                raise UnusableCertificate(f"the certificate in the Secret cannot be loaded: {error}") from None
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
        raise UnusableCertificate(f"the Secret holds no valid certificate: {error}") from None
    if not chain:
        raise UnusableCertificate("the Secret is empty")
    return Certificate(chain, key, authorities)


def _data(certificate: Certificate) -> dict[str, str]:
    parts = {"tls.crt": certificate.chain, "tls.key": certificate.key, "ca.crt": certificate.authorities}
    return {name: base64.b64encode(content).decode() for name, content in parts.items()}
