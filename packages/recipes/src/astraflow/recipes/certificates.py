"""`recipes certificates DIR`: a private CA, a server's and a client's certificate, and a token, for tls:// addresses.

Invariant: every private file is 0600 from its first byte, and is written whole. An authority and a token that are there
already are kept, so that the command run again renews the certificates and nobody must be told.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .config import ConfigError

CA_DAYS = 3650
EARLIER = timedelta(hours=1)
"""Certificates are valid from before now: clocks differ."""

LOCAL = ("localhost", "127.0.0.1", "::1")
TOKEN_BYTES = 32

Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def write_certificates(directory: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Write `ca`, `server` and `client` (`.pem` and `-key.pem`) and `token`; returns the files written.

    The server's certificate is for `hosts`, names or IP addresses, and this machine's loopback.

    Raises:
        ConfigError: the directory holds half an authority, or files that are not one, or a host is not a name.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    written: list[Path] = []
    authority = _load_authority(directory)
    if authority is None:
        authority = _make_authority()
        written += _write_pair(directory, "ca", *authority)
    names = [_general_name(host) for host in dict.fromkeys((*hosts, *LOCAL))]
    server = _issue(authority, "AstraFlow server", names, ExtendedKeyUsageOID.SERVER_AUTH, days)
    client = _issue(authority, "AstraFlow client", [], ExtendedKeyUsageOID.CLIENT_AUTH, days)
    written += _write_pair(directory, "server", *server) + _write_pair(directory, "client", *client)
    token = directory / "token"
    if not token.exists():
        _write(token, f"{secrets.token_urlsafe(TOKEN_BYTES)}\n".encode(), 0o600)
        written.append(token)
    return written


def _load_authority(directory: Path) -> Authority | None:
    certificate, key = directory / "ca.pem", directory / "ca-key.pem"
    if not certificate.exists() and not key.exists():
        return None
    try:
        loaded = load_pem_private_key(key.read_bytes(), None)
        authority = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{directory} has a ca.pem or ca-key.pem that cannot be used: {error}") from error
    if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != authority.public_key():
        raise ConfigError(f"{key} is not the key of {certificate}")
    return authority, loaded


def _make_authority() -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("AstraFlow private CA")
    certificate = (
        _builder(name, name, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    return certificate, key


def _issue(
    authority: Authority, title: str, names: Sequence[x509.GeneralName], purpose: x509.ObjectIdentifier, days: int
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    issuer, issuer_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(_name(title), issuer.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, SHA256()), key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
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


def _name(title: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or "/" in host or ":" in host or not host.isascii():
        raise ConfigError(f"--host {host}: want a name or an IP address, as in --host trainer.example.org 10.0.0.7")
    return x509.DNSName(host)


def _write_pair(
    directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> list[Path]:
    paths = [directory / f"{name}-key.pem", directory / f"{name}.pem"]
    _write(paths[0], key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _write(paths[1], certificate.public_bytes(Encoding.PEM), 0o644)
    return paths


def _write(path: Path, data: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
