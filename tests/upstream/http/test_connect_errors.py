import errno
import socket
import ssl

import pytest

from gateway.upstream.http.connect_errors import is_local_exhaustion


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
