"""Issue and check the webhook's certificate. `certificate_keeper` stores it in a Secret and renews it.

The API server calls the webhook over TLS and trusts exactly the CAs in the webhook's configuration (``caBundle``). The
API server is the only client, so each certificate is signed by its own CA, whose key is discarded at once and cannot
sign another certificate. While some replicas still serve the older certificate, the API server must trust both, so the
bundle of the newer one also includes the older CA.

No I/O; the time is an argument. Keys, serial numbers and signatures are random.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME: Final = timedelta(days=365)
#: Tolerated clock skew: how far the clocks of other machines may be behind the operator's.
_SKEW: Final = timedelta(hours=1)


class UnusableCertificate(Exception):  # noqa: N818 - the certificate is wrong, not the operator
    """The certificate is missing, unusable or due for renewal; the message states why."""


@dataclass(frozen=True)
class Certificate:
    """A certificate, its key and its CA certificates, all as PEM.

    Attributes:
        chain: the server's certificate, then the intermediate certificates up to its CA.
        key: its private key.
        authorities: certificates of the trusted CAs, its own first; may be empty.
    """

    chain: bytes
    key: bytes
    authorities: bytes = b""

    @property
    def leaf(self) -> x509.Certificate:
        """The server's certificate.

        Raises:
            UnusableCertificate: `chain` holds no certificate.
        """
        return _certificates(self.chain, "tls.crt")[0]

    @property
    def expires(self) -> datetime:
        """Time of expiry."""
        return self.leaf.not_valid_after_utc

    def check(self, now: datetime) -> None:
        """Check that a server can present the certificate.

        Raises:
            UnusableCertificate: the certificate or its key is invalid, or the certificate has expired.
        """
        leaf = self.leaf
        try:
            key = serialization.load_pem_private_key(self.key, password=None)
        except (ValueError, TypeError) as error:
            raise UnusableCertificate(f"tls.key holds no key: {error}") from None
        if _public_bytes(key.public_key()) != _public_bytes(leaf.public_key()):
            raise UnusableCertificate("tls.key is not the key of tls.crt")
        if now >= leaf.not_valid_after_utc:
            raise UnusableCertificate(f"tls.crt expired on {leaf.not_valid_after_utc:%Y-%m-%d}")

    def check_ours(self, hosts: Sequence[str], now: datetime) -> None:
        """Check that the certificate is usable, signed by its CA, valid for these hosts, and not due for renewal.

        Raises:
            UnusableCertificate: it is not.
        """
        self.check(now)
        leaf = self.leaf
        authority = _certificates(self.authorities, "ca.crt")[0]
        try:
            leaf.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError, TypeError):
            raise UnusableCertificate("ca.crt did not sign tls.crt") from None
        try:
            names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            raise UnusableCertificate("tls.crt names no host") from None
        if missing := [host for host in hosts if _general_name(host) not in names]:
            raise UnusableCertificate(f"tls.crt is not for {', '.join(missing)}")
        if now >= renewal(self):
            raise UnusableCertificate(f"tls.crt expires on {leaf.not_valid_after_utc:%Y-%m-%d}")


def renewal(certificate: Certificate) -> datetime:
    """Return when the certificate is due for renewal: after two thirds of its lifetime."""
    leaf = certificate.leaf
    return leaf.not_valid_before_utc + (leaf.not_valid_after_utc - leaf.not_valid_before_utc) * 2 / 3


def issue(hosts: Sequence[str], now: datetime, older: bytes = b"") -> Certificate:
    """Issue a new certificate for `hosts`, with its own CA.

    Args:
        hosts: DNS names and IP addresses of the server; at least one.
        now: the time, with its zone.
        older: CA certificates of the replaced certificate, as PEM; the first stays trusted if it has not expired.
    """
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    # The time in the name distinguishes the CAs in a bundle.
    authority_name = _common_name(f"stoker-webhook-ca {now:%Y-%m-%dT%H:%M:%SZ}")
    authority_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(authority_id, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    leaf = (
        _builder(_common_name(hosts[0][:64]), authority_name, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_id), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Certificate(
        chain=_pem(leaf),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        authorities=_pem(authority) + _still_trusted(older, now),
    )


def _still_trusted(older: bytes, now: datetime) -> bytes:
    """Return the first of the older CA certificates, as PEM; empty if there is none or it has expired."""
    try:
        first = _certificates(older, "ca.crt")[0]
    except UnusableCertificate:
        return b""
    return _pem(first) if now < first.not_valid_after_utc else b""


def _certificates(pem: bytes, source: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise UnusableCertificate(f"{source} holds no certificate: {error}") from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + LIFETIME)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _public_bytes(key: object) -> bytes:
    assert hasattr(key, "public_bytes")
    encoded: bytes = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return encoded
