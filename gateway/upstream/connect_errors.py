"""Explains connect errors in plain words."""

from __future__ import annotations

import errno
import os
import socket
import ssl

from gateway.errors import RETRY_AFTER, ErrorKind, GatewayError, ServerName
from gateway.upstream.address import ServerAddress

# Numbers of <openssl/x509_vfy.h>.
_DISTRUST = {9: "its certificate is not valid yet", 10: "its certificate has expired"}
_UNKNOWN_ISSUER = frozenset((2, 18, 19, 20, 21))
_NAME_MISMATCH = frozenset((62, 64))

_REJECTED = "it does not accept the gateway's certificate"
_CERTIFICATE_REFUSALS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a client certificate",
    "TLSV1_ALERT_UNKNOWN_CA": _REJECTED,
    "TLSV1_ALERT_ACCESS_DENIED": _REJECTED,
    "SSLV3_ALERT_BAD_CERTIFICATE": _REJECTED,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": _REJECTED,
    "SSLV3_ALERT_CERTIFICATE_REVOKED": _REJECTED,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _REJECTED,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": _REJECTED,
}
# OpenSSL's errors if the server's first bytes are not TLS.
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
    "HTTP_REQUEST",
)
_OLD_TLS = ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION")
_TLS_ERRORS = {
    **_CERTIFICATE_REFUSALS,
    **dict.fromkeys(_NOT_TLS, "it does not speak TLS"),
    **dict.fromkeys(_OLD_TLS, "it speaks no TLS of version 1.2 or newer"),
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": "it does not speak this version of HTTP",
}

# The machine or the process ran out of something. Ports run out per server.
_EXHAUSTED = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
)


def connect_error(error: Exception, name: ServerName, address: ServerAddress) -> GatewayError:
    """Make the error of a call for which there is no connection."""
    tls = address.tls
    reason = describe_connect_error(error, None if tls is None else tls.server_name)
    public_reason = reason if name.public == name.url else describe_for_clients(error)
    kind, what, retry_after = ErrorKind.UNREACHABLE, "cannot connect to", None
    if is_local_exhaustion(error):
        # The server is not at fault, and another endpoint may have an idle connection.
        kind, retry_after = ErrorKind.EXHAUSTED, RETRY_AFTER
        what = "the gateway is out of local resources (ports or file descriptors) for"
    public = f"{what} {name.public}: {public_reason}"
    return GatewayError(kind, f"{what} {name.url}: {reason}", retry_after, public_message=public)


def is_local_exhaustion(error: Exception) -> bool:
    """Tell whether a connect failed because this machine ran out of files, ports or memory."""
    return isinstance(error, OSError) and error.errno in _EXHAUSTED


def describe_connect_error(error: Exception, server_name: str | None = None) -> str:
    """Say why a connect failed; ``server_name`` is the name that TLS expects."""
    match error:
        case TimeoutError():
            return "no connection in time"
        case ssl.SSLCertVerificationError():
            return _describe_distrust(error, server_name)
        case ssl.SSLError():
            return describe_tls_error(error)
        case ConnectionResetError(errno=None):
            # The event loop raises it at an unexpected end of the handshake.
            return "it closed the connection within the TLS handshake"
        # Numbers that are no errno come from getaddrinfo.
        case OSError(errno=int(number)) if number in errno.errorcode:
            return os.strerror(number)
        case OSError(strerror=str(text)):
            return text
        case _:
            return str(error)


def describe_for_clients(error: Exception) -> str:
    """Say why a connect failed, without an address or a name of the server."""
    match error:
        case ssl.SSLCertVerificationError(verify_code=int(code)) if code in _NAME_MISMATCH:
            return "its certificate is for another name"
        case TimeoutError() | ssl.SSLError() | ConnectionResetError() | socket.gaierror():
            return describe_connect_error(error)
        case OSError(errno=int(number)) if number in errno.errorcode:
            return os.strerror(number)
        case _:
            # Errors of several addresses quote each of them.
            return "no connection"


def describe_tls_error(error: ssl.SSLError) -> str:
    """Say why TLS failed, other than for the server's certificate."""
    reason = error.reason or ""
    known = _TLS_ERRORS.get(reason)
    return known or f"TLS failed: {reason.lower().replace('_', ' ') or error}"


def describe_certificate_refusal(error: Exception | None) -> str | None:
    """Say why the server refused the gateway's certificate; None for another error."""
    return _CERTIFICATE_REFUSALS.get(error.reason) if isinstance(error, ssl.SSLError) else None


def _describe_distrust(error: ssl.SSLCertVerificationError, server_name: str | None) -> str:
    code = error.verify_code
    if code in _NAME_MISMATCH:
        return f"its certificate does not name {server_name}"
    what = "is not trusted" if code in _UNKNOWN_ISSUER else "cannot be used"
    return _DISTRUST.get(code) or f"its certificate {what} ({error.verify_message})"
