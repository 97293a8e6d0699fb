"""TLS to the servers of an upstream."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from gateway.system.certificates import load_authorities, load_certificate


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: the authorities to trust, and the gateway's own certificate.

    Without ``ca`` the system's authorities are trusted. ``certificate`` and ``key`` come together.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


def client_context(
    files: CertificateFiles, verify: bool = True, is_http2: bool = False
) -> ssl.SSLContext:
    """Make the context of connections to servers; ``verify`` checks their certificates.

    Raises CertificateFileError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A server must not choose another version of HTTP than the one that the gateway sends.
    context.set_alpn_protocols(["h2" if is_http2 else "http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if files.ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        load_authorities(context, files.ca, "ca")
    if files.certificate is not None and files.key is not None:
        load_certificate(context, files.certificate, files.key)
    return context
