"""Certificates that are made for a test run, and what TLS to and from its servers takes."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import trustme

from tests.support.addresses import HOST


@cache
def authority() -> trustme.CA:
    """Give the authority that the tests' endpoints trust."""
    return trustme.CA()


@cache
def server_certificate(*names: str) -> trustme.LeafCert:
    """Give a certificate for these names; for those of this machine, where there are none."""
    return authority().issue_cert(*(names or ("localhost", "127.0.0.1", HOST)))


@cache
def expired_certificate() -> trustme.LeafCert:
    """Give a certificate that was good until yesterday."""
    return authority().issue_cert("127.0.0.1", not_after=datetime.now(UTC) - timedelta(days=1))


def server_context(
    certificate: trustme.LeafCert | None = None, clients: trustme.CA | None = None
) -> ssl.SSLContext:
    """Make the context of a server; ``clients`` is who issues the certificates they must show."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (certificate or server_certificate()).configure_cert(context)
    if clients is not None:
        clients.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
    """Make the context of a client, which trusts the authority and may show a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority().configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    return context


def ca_file(folder: Path) -> str:
    """Write the authority's certificate to a file."""
    file = folder / "ca.pem"
    authority().cert_pem.write_to_path(str(file))
    return str(file)


def certificate_files(folder: Path, certificate: trustme.LeafCert | None = None) -> tuple[str, str]:
    """Write a certificate and its key to files."""
    leaf = certificate or server_certificate("gateway")
    files = str(folder / "certificate.pem"), str(folder / "key.pem")
    for blob, file in zip((leaf.cert_chain_pems[0], leaf.private_key_pem), files, strict=True):
        blob.write_to_path(file)
    return files
