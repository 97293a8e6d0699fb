"""A server that refuses its client during the TLS handshake."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def refusing_server(context: ssl.SSLContext) -> Iterator[str]:
    """Run a server that refuses the one client it gets, and says so, as event loops do not."""

    def refuse() -> None:
        plain, _ = listening.accept()
        with context.wrap_socket(plain, True, do_handshake_on_connect=False) as sock:
            sock.settimeout(5)
            with suppress(ssl.SSLError):
                sock.do_handshake()
            sock.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                while sock.recv(65536):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=refuse)
        thread.start()
        yield "https://{}:{}".format(*listening.getsockname())
        thread.join()
