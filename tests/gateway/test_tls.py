"""TLS for clients: flags, HTTP/2, and a certificate that is renewed as in a pod."""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest

from stoker_gateway.cli.gateway import main
from stoker_operator.admission.certificates import Certificate, issue

from ..support.waiting import until_async
from .behind_envoy import CHAT
from .test_gateway import _BODY, command


class MountedSecret:
    """A Secret as mounted in a pod: files are links into ``..data``, a link to the folder with the current files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        self.put(issue(["127.0.0.1"], datetime.now(UTC)))
        for name in ("tls.crt", "tls.key"):
            (folder / name).symlink_to(f"..data/{name}")

    def put(self, certificate: Certificate) -> None:
        self.certificate = certificate
        self._number += 1
        data = self.folder / f"..{self._number}"
        data.mkdir()
        (data / "tls.crt").write_bytes(certificate.chain)
        (data / "tls.key").write_bytes(certificate.key)
        (self.folder / "..data_tmp").symlink_to(data.name)
        (self.folder / "..data_tmp").rename(self.folder / "..data")

    @property
    def flags(self) -> list[str]:
        return ["--tls-cert", str(self.folder / "tls.crt"), "--tls-key", str(self.folder / "tls.key")]

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.certificate.authorities.decode())


def test_renewed_certificate_is_used_without_interrupting_streams(tmp_path: Path) -> None:
    secret = MountedSecret(tmp_path)

    async def main() -> None:
        async with command(*secret.flags) as run:
            assert run.url.startswith("https://")
            port = int(run.url.rpartition(":")[2])
            run.server.does = "stream"
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=secret.trust)) as client,
                client.post(run.url + CHAT, data=_BODY) as under_way,
            ):
                assert await under_way.content.readuntil(b"\n\n") == b"data: 1\n\n"
                older = secret.certificate
                secret.put(issue(["127.0.0.1"], datetime.now(UTC)))

                async def holds() -> bool:
                    return await served(port) == secret.certificate.leaf.serial_number

                await until_async(holds)
                assert secret.certificate.leaf.serial_number != older.leaf.serial_number
                run.server.last = True
                run.server.more.set()
                assert await under_way.read() == b"data: [DONE]\n\n"
            run.server.does = "answer"
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=secret.trust)) as client,
                client.post(run.url + CHAT, data=_BODY) as answer,
            ):
                assert (await answer.json())["server"] == "a"
            run.process.send_signal(signal.SIGTERM)
            code, stderr = await run.ended()
            assert code == 0 and b"Traceback" not in stderr

    async def served(port: int) -> int:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2", "http/1.1"])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        session = writer.get_extra_info("ssl_object")
        assert session.selected_alpn_protocol() == "h2" and session.version() in ("TLSv1.2", "TLSv1.3")
        pem = ssl.DER_cert_to_PEM_cert(session.getpeercert(binary_form=True))
        writer.close()
        return Certificate(pem.encode(), b"").leaf.serial_number

    asyncio.run(main())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tls-cert", "tls.crt"], "--tls-key is missing"),
        (["--tls-key", "tls.key"], "--tls-cert is missing"),
        (["--tls-cert", "none", "--tls-key", "tls.key"], "--tls-cert: none cannot be read"),
        (["--tls-cert", "tls.crt", "--tls-key", "other.key"], "KEY_VALUES_MISMATCH"),
        (["--tls-cert", "tls.key", "--tls-key", "tls.crt"], "not a certificate and its key"),
        (["--tls-cert", "/dev/null", "--tls-key", "/dev/null"], "not a certificate and its key"),
        (["--drain-delay", "-1"], "--drain-delay"),
    ],
)
def test_wrong_tls_flags_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    MountedSecret(tmp_path)
    (tmp_path / "other.key").write_bytes(issue(["a"], datetime.now(UTC)).key)
    with pytest.raises(SystemExit) as ended:
        main(["--endpoint=a=http://127.0.0.1:1", *words])
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)
