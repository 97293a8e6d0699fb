"""The helper's own program: python -m gateway.helper FD, with its end of a socket pair."""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import suppress

from gateway.codec.lent_work import do
from gateway.helper.frames import DONE, HEAD, NOT_DONE, READY, FrameReader, work_of

_READ = 1024 * 1024


def serve(sock: socket.socket) -> None:
    """Say that it is ready, then do what is asked for, in order, until the gateway closes."""
    sock.sendall(READY)
    reader = FrameReader()
    while data := sock.recv(_READ):
        for mark, payload in reader.feed(data):
            result = do(work_of(mark), payload)
            head = HEAD.pack(NOT_DONE if result is None else DONE, len(result or b""))
            sock.sendall(head + (result or b""))


if __name__ == "__main__":
    # A Ctrl-C is meant for the gateway, which closes when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Where writing fails, the gateway is gone.
    with socket.socket(fileno=int(sys.argv[1])) as end, suppress(ConnectionError):
        serve(end)
