"""How TLS is spoken to the servers of an upstream."""

from __future__ import annotations

import ssl
from dataclasses import dataclass


class CertificateFileError(Exception):
    """A file that cannot be used; the message names the setting and the file."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Name the files of certificates, PEM: who is trusted, and who the gateway is.

    Without ``ca`` the system's certificates are trusted. ``certificate`` and ``key`` are given
    both, or neither.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


def client_context(files: CertificateFiles, verify: bool = True) -> ssl.SSLContext:
    """Make the context of connections to servers, whose certificates are checked if ``verify``.

    Raises CertificateFileError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # What is spoken is HTTP/1.1; a server that could do HTTP/2 as well must not choose that.
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if files.ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _trust(context, files.ca)
    if files.certificate is not None and files.key is not None:
        _show(context, files.certificate, files.key)
    return context


def _trust(context: ssl.SSLContext, ca: str) -> None:
    _look_into("ca", ca)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise CertificateFileError(f"ca: {ca} holds no certificates in PEM form") from None


def _show(context: ssl.SSLContext, certificate: str, key: str) -> None:
    _look_into("certificate", certificate)
    _look_into("key", key)
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except _EncryptedKeyError:
        raise CertificateFileError(
            f"key: {key} is encrypted; a key without a password is needed"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateFileError(f"key: {key} is not the key of {certificate}") from None
        raise CertificateFileError(_unusable(certificate, key)) from None


def _look_into(setting: str, file: str) -> None:
    """Raise CertificateFileError for a file that cannot be read: ssl does not tell which one."""
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise CertificateFileError(f"{setting}: cannot read {file}: {error.strerror}") from None


def _unusable(certificate: str, key: str) -> str:
    """Tell which of two files is at fault."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
    except ssl.SSLError:
        return f"certificate: {certificate} holds no certificate in PEM form"
    return f"key: {key} holds no private key in PEM form"


class _EncryptedKeyError(Exception):
    """A key that needs a password."""


def _no_password() -> str:
    # Without this, OpenSSL would ask for it on the terminal.
    raise _EncryptedKeyError
