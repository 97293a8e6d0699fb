"""Certificates and TLS contexts of a test run."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import trustme

from tests.support.addresses import HOST


@cache
def authority() -> trustme.CA:
    """Return the certificate authority that clients and servers of the tests trust."""
    return trustme.CA()


@cache
def server_certificate(*names: str) -> trustme.LeafCert:
    """Return a certificate for these names, or for those of this machine."""
    return authority().issue_cert(*(names or ("localhost", "127.0.0.1", HOST)))


@cache
def expired_certificate() -> trustme.LeafCert:
    """Return a certificate that expired yesterday."""
    return authority().issue_cert("127.0.0.1", not_after=datetime.now(UTC) - timedelta(days=1))


def server_context(
    certificate: trustme.LeafCert | None = None, clients: trustme.CA | None = None
) -> ssl.SSLContext:
    """Return a server's context; client certificates must come from the authority ``clients``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (certificate or server_certificate()).configure_cert(context)
    if clients is not None:
        clients.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
    """Return a client's context, which trusts the authority."""
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
