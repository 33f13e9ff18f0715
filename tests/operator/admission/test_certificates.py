"""Certificates: which a TLS client accepts, and which are kept."""

from __future__ import annotations

import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from stoker_operator.admission.certificates import LIFETIME, Certificate, UnusableCertificate, issue, renewal

NOW = datetime.now(UTC)
HOSTS = ("stoker-webhook.stoker-system.svc", "127.0.0.1")


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return issue(HOSTS, NOW)


def shake_hands(server: Certificate, authorities: bytes, host: str, folder: Path) -> None:
    """Do a TLS handshake in memory, with OpenSSL's verification.

    Raises:
        ssl.SSLError: the client does not accept the server's certificate.
    """
    (folder / "chain").write_bytes(server.chain)
    (folder / "key").write_bytes(server.key)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(folder / "chain", folder / "key")
    theirs = ssl.create_default_context(cadata=authorities.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        theirs.wrap_bio(to_client, to_server, server_hostname=host),
        ours.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(10):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert ends[0].getpeercert()


@pytest.mark.parametrize("host", HOSTS)
def test_certificate_is_accepted_by_a_client_that_trusts_its_authority(
    certificate: Certificate, host: str, tmp_path: Path
) -> None:
    shake_hands(certificate, certificate.authorities, host, tmp_path)


def test_certificate_is_rejected_for_other_hosts(certificate: Certificate, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(certificate, certificate.authorities, "elsewhere.stoker-system.svc", tmp_path)


def test_old_and_new_certificates_are_accepted_during_renewal(certificate: Certificate, tmp_path: Path) -> None:
    newer = issue(HOSTS, NOW, certificate.authorities)
    for server in (certificate, newer):
        shake_hands(server, newer.authorities, HOSTS[0], tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(newer, certificate.authorities, HOSTS[0], tmp_path)


def test_ca_bundle_does_not_grow(certificate: Certificate, tmp_path: Path) -> None:
    second = issue(HOSTS, NOW, certificate.authorities)
    third = issue(HOSTS, NOW, second.authorities)
    assert third.authorities.count(b"BEGIN CERTIFICATE") == 2
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(certificate, third.authorities, HOSTS[0], tmp_path)


@pytest.mark.parametrize("older", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_invalid_authority_is_left_out(older: bytes) -> None:
    assert issue(HOSTS, NOW, older).authorities.count(b"BEGIN CERTIFICATE") == 1


def test_expired_authority_is_left_out() -> None:
    old = issue(HOSTS, NOW - 2 * LIFETIME)
    assert issue(HOSTS, NOW, old.authorities).authorities.count(b"BEGIN CERTIFICATE") == 1


def test_certificate_is_renewed_after_two_thirds_of_its_lifetime(certificate: Certificate) -> None:
    assert renewal(certificate) - NOW == pytest.approx(LIFETIME * 2 / 3, abs=timedelta(hours=1))
    certificate.check_ours(HOSTS, renewal(certificate) - timedelta(seconds=1))
    with pytest.raises(UnusableCertificate, match="expires on"):
        certificate.check_ours(HOSTS, renewal(certificate))
    certificate.check(renewal(certificate))  # though it can still be served
    with pytest.raises(UnusableCertificate, match="expired on"):
        certificate.check(NOW + LIFETIME + timedelta(seconds=1))


@pytest.mark.parametrize(
    ("part", "content", "why"),
    [
        ("chain", b"", "tls.crt holds no certificate"),
        ("chain", b"nonsense", "tls.crt holds no certificate"),
        ("key", b"nonsense", "tls.key holds no key"),
        ("key", issue(HOSTS, NOW).key, "tls.key is not the key of tls.crt"),
        ("authorities", b"", "ca.crt holds no certificate"),
        ("authorities", issue(HOSTS, NOW).authorities, "ca.crt did not sign tls.crt"),
    ],
)
def test_mismatched_parts_of_a_certificate_are_refused(
    certificate: Certificate, part: str, content: bytes, why: str
) -> None:
    with pytest.raises(UnusableCertificate, match=why):
        replace(certificate, **{part: content}).check_ours(HOSTS, NOW)


def test_missing_hosts_of_a_certificate_are_named(certificate: Certificate) -> None:
    with pytest.raises(UnusableCertificate, match=r"tls.crt is not for 10\.0\.0\.1, new$"):
        certificate.check_ours((*HOSTS, "10.0.0.1", "new"), NOW)
