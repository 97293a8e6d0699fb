"""Explains connect errors in plain words."""

from __future__ import annotations

import errno
import os
import socket
import ssl

from gateway.errors import RETRY_AFTER, ErrorKind, GatewayError, ServerName
from gateway.upstream.address import ServerAddress

# Numbers of <openssl/x509_vfy.h>.
_NOT_YET_VALID = 9
_EXPIRED = 10
_UNKNOWN_ISSUER = frozenset((2, 18, 19, 20, 21))
_NAME_MISMATCH = frozenset((62, 64))

# OpenSSL's errors if the server's first bytes are not TLS.
_NOT_TLS = frozenset(
    ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
)
_UNSUPPORTED_VERSION = frozenset(("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"))
_NO_PROTOCOL = frozenset(("TLSV1_ALERT_NO_APPLICATION_PROTOCOL",))
_CERTIFICATE_REQUIRED = frozenset(("TLSV13_ALERT_CERTIFICATE_REQUIRED",))
_CERTIFICATE_REJECTED = frozenset(
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
    if reason in _NOT_TLS:
        return "it does not speak TLS"
    if reason in _UNSUPPORTED_VERSION:
        return "it speaks no TLS of version 1.2 or newer"
    if reason in _NO_PROTOCOL:
        return "it does not speak this version of HTTP"
    if refusal := describe_certificate_refusal(error):
        return refusal
    return f"TLS failed: {reason.lower().replace('_', ' ') or error}"


def describe_certificate_refusal(error: Exception | None) -> str | None:
    """Say why the server refused the gateway's certificate; None for another error."""
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    if reason in _CERTIFICATE_REQUIRED:
        return "it asks for a client certificate"
    if reason in _CERTIFICATE_REJECTED:
        return "it does not accept the gateway's certificate"
    return None


def _describe_distrust(error: ssl.SSLCertVerificationError, server_name: str | None) -> str:
    if error.verify_code == _EXPIRED:
        return "its certificate has expired"
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet"
    if error.verify_code in _NAME_MISMATCH:
        return f"its certificate does not name {server_name}"
    if error.verify_code in _UNKNOWN_ISSUER:
        return f"its certificate is not trusted ({error.verify_message})"
    return f"its certificate cannot be used ({error.verify_message})"
