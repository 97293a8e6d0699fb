"""Loads PEM files of certificates and keys, with errors that name setting and file."""

from __future__ import annotations

import ssl
from dataclasses import dataclass


class CertificateFileError(Exception):
    """A file that cannot be used; the message names the setting and the file."""


def load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load a certificate and its key into a context.

    Raises CertificateFileError, and OSError if a file vanishes meanwhile.
    """
    _check_readable("certificate", certificate)
    _check_readable("key", key)
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except _EncryptedKeyError:
        raise CertificateFileError(
            f"key: {key} is encrypted; a key without a password is needed"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateFileError(f"key: {key} is not the key of {certificate}") from None
        raise CertificateFileError(_explain_unusable(certificate, key, error)) from None


def load_authorities(context: ssl.SSLContext, authorities: str, setting: str) -> None:
    """Make a context trust the authorities in a file; ``setting`` names it in errors.

    Raises as ``load_certificate`` does.
    """
    _check_readable(setting, authorities)
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError:
        raise CertificateFileError(
            f"{setting}: {authorities} holds no certificates in PEM form"
        ) from None


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


def _check_readable(setting: str, file: str) -> None:
    """Raise CertificateFileError for an unreadable file; ssl would not name it."""
    try:
        with open(file, "rb") as opened:
            opened.read(1)
    except OSError as error:
        raise CertificateFileError(f"{setting}: cannot read {file}: {error.strerror}") from None


def _explain_unusable(certificate: str, key: str, error: ssl.SSLError) -> str:
    """Say which of the two files is invalid."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
    except ssl.SSLError:
        return f"certificate: {certificate} holds no certificate in PEM form"
    if error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
        weakness = error.reason.replace("_", " ").lower()
        return f"certificate: {certificate} is too weak: {weakness}"
    return f"key: {key} holds no private key in PEM form"


class _EncryptedKeyError(Exception):
    """A key that needs a password."""


def _no_password() -> str:
    # Otherwise OpenSSL asks for it on the terminal.
    raise _EncryptedKeyError
