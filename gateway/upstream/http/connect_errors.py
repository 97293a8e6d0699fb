"""Why a server could not be connected to, in plain words."""

from __future__ import annotations

import errno
import os
import ssl

# Numbers of <openssl/x509_vfy.h>.
_NOT_YET_VALID = 9
_EXPIRED = 10
_OF_UNKNOWN_ISSUER = frozenset((2, 18, 19, 20, 21))
_OTHER_NAME = frozenset((62, 64))

# What the server's first bytes are taken for where they are no TLS.
_NO_TLS = frozenset(
    ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
)
_OTHER_VERSION = frozenset(("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"))
_NO_CERTIFICATE = frozenset(("TLSV13_ALERT_CERTIFICATE_REQUIRED",))
_OTHER_CERTIFICATE = frozenset(
    (
        "TLSV1_ALERT_UNKNOWN_CA",
        "TLSV1_ALERT_ACCESS_DENIED",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    )
)


# What the machine or the process has no more of. Ports run out towards one server at a time.
_EXHAUSTED = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
)


def is_local_exhaustion(error: Exception) -> bool:
    """Tell whether it is on this side that a connection fails, for lack of what it takes."""
    return isinstance(error, OSError) and error.errno in _EXHAUSTED


def describe_connect_error(error: Exception, server_name: str | None = None) -> str:
    """Tell why there is no connection; ``server_name`` is given where it was to be over TLS."""
    match error:
        case TimeoutError():
            return "no connection in time"
        case ssl.SSLCertVerificationError():
            return _why_not_trusted(error, server_name)
        case ssl.SSLError():
            return describe_tls_error(error)
        case ConnectionResetError(errno=None):
            # The event loop's own, at an end where none was expected.
            return "it closed the connection within the TLS handshake"
        # Numbers that the system does not know are those of the name look-up.
        case OSError(errno=int(number)) if number in errno.errorcode:
            return os.strerror(number)
        case OSError(strerror=str(text)):
            return text
        case _:
            return str(error)


def describe_tls_error(error: ssl.SSLError) -> str:
    """Tell why TLS failed, for another reason than the server's certificate."""
    reason = error.reason or ""
    if reason in _NO_TLS:
        return "it does not speak TLS"
    if reason in _OTHER_VERSION:
        return "it speaks no TLS of version 1.2 or newer"
    if refused := describe_certificate_refusal(error):
        return refused
    return f"TLS failed: {reason.lower().replace('_', ' ') or error}"


def describe_certificate_refusal(error: Exception | None) -> str | None:
    """Tell why the server refused the gateway's certificate, if that is what the error says."""
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    if reason in _NO_CERTIFICATE:
        return "it asks for a client certificate"
    if reason in _OTHER_CERTIFICATE:
        return "it does not accept the gateway's certificate"
    return None


def _why_not_trusted(error: ssl.SSLCertVerificationError, server_name: str | None) -> str:
    if error.verify_code == _EXPIRED:
        return "its certificate has expired"
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet"
    if error.verify_code in _OTHER_NAME:
        return f"its certificate does not name {server_name}"
    if error.verify_code in _OF_UNKNOWN_ISSUER:
        return f"its certificate is not trusted ({error.verify_message})"
    return f"its certificate cannot be used ({error.verify_message})"
