"""The webhook's certificate in Secret, configuration and server: writers, timing, and clients' view."""

from __future__ import annotations

import asyncio
import base64
import copy
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_operator.admission import certificate_keeper
from stoker_operator.admission.certificate_keeper import CertificateKeeper
from stoker_operator.admission.certificates import LIFETIME, Certificate, issue
from stoker_operator.cluster.kube import KubeError, Object
from stoker_operator.settings import WebhookSettings

from ...support.waiting import until_async

OURS = WebhookSettings("127.0.0.1:0", "stoker-system", "stoker-webhook", ("localhost",), "stoker")
THEIRS = WebhookSettings("127.0.0.1:0", "stoker-system", "stoker-webhook", external=True)


class Kube:
    """A Secret and a ValidatingWebhookConfiguration; records writes in order."""

    def __init__(self) -> None:
        self.version = 1
        self.objects: dict[str, Object] = {
            "Secret": {"kind": "Secret", "metadata": {"name": "stoker-webhook", "resourceVersion": "1"}},
            "ValidatingWebhookConfiguration": {
                "metadata": {"name": "stoker", "resourceVersion": "1"},
                "webhooks": [{"name": "a.stoker.dev", "clientConfig": {"service": {"name": "stoker-webhook"}}}],
            },
        }
        self.written: list[str] = []
        self.looks = 0
        self.before_write: Callable[[], None] = lambda: None

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        self.looks += kind == "Secret"
        assert (namespace, name) == ("stoker-system", "stoker-webhook") if kind == "Secret" else ("", "stoker")
        return copy.deepcopy(self.objects.get(kind))

    def replace(self, body: Object) -> Object:
        self.before_write()
        assert body["kind"] == "Secret"
        if body["metadata"]["resourceVersion"] != self.objects["Secret"]["metadata"]["resourceVersion"]:
            raise KubeError(409, "it has changed")
        self._put("Secret", body)
        return body

    def patch(self, kind: str, namespace: str, name: str, operations: list[Object]) -> Object:
        found = copy.deepcopy(self.objects[kind])
        for each in operations:
            if each["op"] == "test":
                assert each["path"] == "/metadata/resourceVersion"
                if each["value"] != found["metadata"]["resourceVersion"]:
                    raise KubeError(422, "it has changed")
            else:
                empty, webhooks, index, client, bundle = each["path"].split("/")
                assert (empty, webhooks, client, bundle) == ("", "webhooks", "clientConfig", "caBundle")
                found["webhooks"][int(index)]["clientConfig"]["caBundle"] = each["value"]
        self._put(kind, found)
        return found

    def _put(self, kind: str, body: Object) -> None:
        self.version += 1
        self.objects[kind] = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        self.written.append(kind)

    async def looked_at_again(self) -> None:
        """Wait until two more rounds of the keeper have started; each reads the Secret once or twice."""
        before = self.looks
        await until_async(lambda: self.looks >= before + 5)

    def store(self, certificate: Certificate | None) -> None:
        """Write the Secret as another process would."""
        data = {}
        if certificate:
            parts = {"tls.crt": certificate.chain, "tls.key": certificate.key, "ca.crt": certificate.authorities}
            data = {name: base64.b64encode(value).decode() for name, value in parts.items()}
        self._put("Secret", {**self.objects["Secret"], "data": data})
        self.written.clear()

    @property
    def stored(self) -> dict[str, bytes]:
        return {name: base64.b64decode(value) for name, value in self.objects["Secret"].get("data", {}).items()}

    @property
    def announced(self) -> bytes:
        config: Any = self.objects["ValidatingWebhookConfiguration"]
        return base64.b64decode(config["webhooks"][0]["clientConfig"].get("caBundle", ""))


@dataclass
class Clock:
    """A clock that starts in the past, so that clients, which use real time, accept certificates issued at its end."""

    now: datetime

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_keeper, "_SOON", 0.01)
    monkeypatch.setattr(certificate_keeper, "_LATER", 0.02)


def keeper(kube: Kube, settings: WebhookSettings = OURS, **options: Any) -> CertificateKeeper:
    return CertificateKeeper(kube, settings, **{"leading": lambda: True, **options})  # type: ignore[arg-type]


async def presented(tls: ssl.SSLContext, authorities: bytes, host: str = "localhost") -> bytes:
    """Return the certificate that the server presents to a client with this CA bundle."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls)
    async with server:
        trusting = ssl.create_default_context(cadata=authorities.decode())
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname=host)
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
    return ssl.DER_cert_to_PEM_cert(shown).encode()


async def until_presented(certificate_keeper: CertificateKeeper, authorities: bytes, certificate: bytes) -> None:
    async def is_presented() -> bool:
        return await presented(certificate_keeper.tls, authorities) == certificate

    await until_async(is_presented, "the certificate is presented")


def test_leader_announces_the_ca_before_it_stores_a_certificate() -> None:
    async def main() -> None:
        kube, served = Kube(), list[Certificate]()
        certificate_keeper = keeper(kube, on_load=served.append)
        await certificate_keeper.start()
        await until_async(lambda: certificate_keeper.loaded)
        assert kube.written == ["ValidatingWebhookConfiguration", "Secret"]
        assert kube.announced == kube.stored["ca.crt"]
        assert await presented(certificate_keeper.tls, kube.announced) == kube.stored["tls.crt"] == served[0].chain
        await kube.looked_at_again()
        assert len(kube.written) == 2, "an up-to-date certificate is not written again"
        assert len(served) == 1
        await certificate_keeper.stop()

    asyncio.run(main())


def test_standby_waits_for_the_certificate_and_serves_it() -> None:
    async def main() -> None:
        kube, leads = Kube(), False
        certificate_keeper = keeper(kube, leading=lambda: leads)
        await certificate_keeper.start()
        await kube.looked_at_again()
        assert not certificate_keeper.loaded and not kube.written
        with pytest.raises(OSError):
            await presented(certificate_keeper.tls, issue(OURS.hosts, datetime.now(UTC)).authorities)
        made = issue(OURS.hosts, datetime.now(UTC))
        kube.store(made)
        await until_async(lambda: certificate_keeper.loaded)
        assert await presented(certificate_keeper.tls, made.authorities) == made.chain
        assert not kube.written
        await certificate_keeper.stop()

    asyncio.run(main())


def test_renewed_certificate_is_served_without_restart_and_the_old_ca_stays() -> None:
    async def main() -> None:
        kube, clock = Kube(), Clock(datetime.now(UTC) - LIFETIME * 2 / 3)
        leader, other = keeper(kube, now=clock), keeper(kube, now=clock, leading=lambda: False)
        await leader.start()
        await other.start()
        await until_async(lambda: leader.loaded and other.loaded)
        older = kube.stored["tls.crt"]
        clock.now += LIFETIME * 2 / 3
        await until_async(lambda: kube.stored["tls.crt"] != older)
        newer = kube.stored["tls.crt"]
        for each in (leader, other):
            await until_presented(each, kube.announced, newer)
        assert kube.announced.count(b"BEGIN CERTIFICATE") == 2
        await leader.stop()
        await other.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    "content",
    [
        {"tls.crt": "bm9uc2Vuc2U="},
        {"tls.crt": "?", "tls.key": "?"},
        {"something": "ZWxzZQ=="},
    ],
)
def test_secret_with_other_content_is_overwritten(content: dict[str, str]) -> None:
    async def main() -> None:
        kube = Kube()
        kube.objects["Secret"]["data"] = content
        certificate_keeper = keeper(kube)
        await certificate_keeper.start()
        await until_async(lambda: certificate_keeper.loaded)
        assert set(kube.stored) == {"tls.crt", "tls.key", "ca.crt"}
        assert await presented(certificate_keeper.tls, kube.announced) == kube.stored["tls.crt"]
        await certificate_keeper.stop()

    asyncio.run(main())


def test_concurrent_leaders_agree_on_one_certificate() -> None:
    async def main() -> None:
        kube = Kube()
        rival = issue(OURS.hosts, datetime.now(UTC))

        def be_faster() -> None:
            kube.before_write = lambda: None
            kube.store(rival)

        kube.before_write = be_faster
        certificate_keeper = keeper(kube)
        await certificate_keeper.start()
        await until_async(lambda: kube.announced == rival.authorities)
        await until_async(lambda: certificate_keeper.loaded)
        assert kube.stored["tls.crt"] == rival.chain
        assert await presented(certificate_keeper.tls, kube.announced) == rival.chain
        await certificate_keeper.stop()

    asyncio.run(main())


def test_foreign_changes_of_the_ca_bundle_are_reverted() -> None:
    async def main() -> None:
        kube = Kube()
        certificate_keeper = keeper(kube)
        await certificate_keeper.start()
        await until_async(lambda: certificate_keeper.loaded)
        right = kube.announced
        config: Any = kube.objects["ValidatingWebhookConfiguration"]
        del config["webhooks"][0]["clientConfig"]["caBundle"]
        await until_async(lambda: kube.announced == right)
        await certificate_keeper.stop()

    asyncio.run(main())


def test_ca_is_announced_although_the_configuration_changes_meanwhile() -> None:
    kube = Kube()
    patch = kube.patch

    def after_a_change(kind: str, namespace: str, name: str, operations: list[Object]) -> Object:
        kube.patch = patch  # type: ignore[method-assign]
        kube._put(kind, kube.objects[kind])
        return patch(kind, namespace, name, operations)

    kube.patch = after_a_change  # type: ignore[method-assign]
    assert keeper(kube)._renew_if_due() == ""
    assert kube.announced == kube.stored["ca.crt"]


def test_new_leader_announces_the_ca_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_keeper, "_LATER", 3600)

    async def main() -> None:
        kube, leads = Kube(), False
        kube.store(issue(OURS.hosts, datetime.now(UTC)))
        certificate_keeper = keeper(kube, leading=lambda: leads)
        await certificate_keeper.start()
        await until_async(lambda: certificate_keeper.loaded)
        assert not kube.announced
        leads = True
        certificate_keeper.wake()
        await until_async(lambda: kube.announced == kube.stored["ca.crt"])
        await certificate_keeper.stop()

    asyncio.run(main())


def test_certificate_is_served_without_a_webhook_configuration(caplog: pytest.LogCaptureFixture) -> None:
    def num_warnings() -> int:
        return sum("there is no ValidatingWebhookConfiguration stoker" in line for line in caplog.messages)

    async def main() -> None:
        kube = Kube()
        del kube.objects["ValidatingWebhookConfiguration"]
        certificate_keeper = keeper(kube)
        await certificate_keeper.start()
        await until_async(lambda: certificate_keeper.loaded)
        await until_async(num_warnings)
        await kube.looked_at_again()
        await certificate_keeper.stop()

    asyncio.run(main())
    assert num_warnings() == 1


def test_missing_secret_is_logged_once_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    def num_warnings() -> int:
        return sum("there is no Secret stoker-system/stoker-webhook" in line for line in caplog.messages)

    async def main() -> None:
        kube = Kube()
        secret = kube.objects.pop("Secret")
        certificate_keeper = keeper(kube)
        await certificate_keeper.start()
        await until_async(num_warnings)
        await kube.looked_at_again()
        kube.objects["Secret"] = secret
        await until_async(lambda: certificate_keeper.loaded)
        await certificate_keeper.stop()

    asyncio.run(main())
    assert num_warnings() == 1
    assert "recreate it with helm upgrade" in caplog.text and "running replicas" not in caplog.text


def test_deleted_secret_is_logged_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        kube = Kube()
        certificate_keeper = keeper(kube)
        await certificate_keeper.start()
        await until_async(lambda: certificate_keeper.loaded)
        del kube.objects["Secret"]
        certificate_keeper.wake()
        await until_async(lambda: "recreate it with helm upgrade; running replicas serve the last" in caplog.text)
        assert certificate_keeper.loaded
        await certificate_keeper.stop()

    asyncio.run(main())


def test_certificate_that_cannot_be_renewed_is_served_until_it_expires(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise KubeError(403, "a policy forbids it")

    async def main() -> None:
        kube = Kube()
        aged = issue(OURS.hosts, datetime.now(UTC) - LIFETIME * 3 / 4)
        kube.store(aged)
        kube.before_write = refuse
        certificate_keeper = keeper(kube)
        await certificate_keeper.start()
        await until_async(lambda: certificate_keeper.loaded)
        assert await presented(certificate_keeper.tls, kube.announced) == aged.chain, (
            "clients trust the aged certificate"
        )
        await certificate_keeper.stop()

    asyncio.run(main())
    assert any("a policy forbids it" in line for line in caplog.messages)


def test_external_certificate_is_served_and_never_written() -> None:
    async def main() -> None:
        kube, clock = Kube(), Clock(datetime.now(UTC) - LIFETIME + timedelta(hours=2))
        certificate_keeper = keeper(kube, THEIRS, now=clock)
        await certificate_keeper.start()
        await kube.looked_at_again()
        assert not certificate_keeper.loaded
        theirs = issue(("localhost",), clock.now)
        kube.store(theirs)
        await until_async(lambda: certificate_keeper.loaded)
        clock.now = datetime.now(UTC)  # its owner must renew it
        renewed = issue(("localhost",), clock.now)
        kube.store(renewed)
        await until_presented(certificate_keeper, theirs.authorities + renewed.authorities, renewed.chain)
        assert not kube.written
        await certificate_keeper.stop()

    asyncio.run(main())
