"""Files of certificates and keys, PEM, for TLS to either side: loaded, or told what is wrong."""

from __future__ import annotations

import ssl


class CertificateFileError(Exception):
    """A file that cannot be used; the message names the setting and the file."""


def load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Have a context show a certificate, of which ``key`` is the key.

    Raises CertificateFileError, and OSError where a file vanishes meanwhile.
    """
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
        raise CertificateFileError(_unusable(certificate, key, error)) from None


def load_authorities(context: ssl.SSLContext, authorities: str, setting: str) -> None:
    """Have a context trust those whose certificates a file holds, which a setting names.

    Raises as ``show`` does.
    """
    _look_into(setting, authorities)
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError:
        raise CertificateFileError(
            f"{setting}: {authorities} holds no certificates in PEM form"
        ) from None


def _look_into(setting: str, file: str) -> None:
    """Raise CertificateFileError for a file that cannot be read: ssl does not tell which one."""
    try:
        with open(file, "rb") as opened:
            opened.read(1)
    except OSError as error:
        raise CertificateFileError(f"{setting}: cannot read {file}: {error.strerror}") from None


def _unusable(certificate: str, key: str, error: ssl.SSLError) -> str:
    """Tell which of two files is at fault."""
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
    # Without this, OpenSSL would ask for it on the terminal.
    raise _EncryptedKeyError
