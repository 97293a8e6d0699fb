import errno
import socket
import ssl

import pytest

from gateway.upstream.connect_errors import describe_for_clients, is_local_exhaustion


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL]
)
def test_exhausted_resources_are_local(number: int) -> None:
    assert is_local_exhaustion(OSError(number, "why"))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        OSError("several reasons"),
        TimeoutError(),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        ssl.SSLError(ssl.SSL_ERROR_SSL, "what?"),
        UnicodeError("no host name"),
    ],
    ids=repr,
)
def test_other_connect_errors_are_the_servers(error: Exception) -> None:
    assert not is_local_exhaustion(error)


def _mismatch() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate is not valid for 'triton.internal'")
    error.verify_code = 62
    error.verify_message = "Hostname mismatch, certificate is not valid for 'triton.internal'"
    return error


def _distrust() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code = 18
    error.verify_message = "self-signed certificate"
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "10.0.0.1"), "Connection refused"),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed ('10.0.0.1', 8000)"),
            "no connection",
        ),
        (TimeoutError(), "no connection in time"),
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "Name or service not known",
        ),
        (_mismatch(), "its certificate is for another name"),
        (_distrust(), "its certificate is not trusted (self-signed certificate)"),
        (UnicodeError("label 'triton-internal' too long"), "no connection"),
        (ConnectionResetError(), "it closed the connection within the TLS handshake"),
    ],
    ids=repr,
)
def test_clients_learn_no_address_from_connect_errors(error: Exception, told: str) -> None:
    assert describe_for_clients(error) == told
