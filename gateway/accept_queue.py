"""The last connections of a listening socket, before it is closed.

A client is connected once the system has put it into the socket's queue, and may have sent its
request: closing the socket would reset all that wait there, those that come between the last look
at the queue and the close, and those whose handshake is under way. So nobody is let in any more
first, for a moment if clients are about, and then the queue is emptied.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

HANDSHAKES = 0.05
"""Seconds in which handshakes under way come to an end."""

_SO_ATTACH_FILTER = 26
_FLAGS, _SYN = 13, 0x02
"""RFC 9293, section 3.1: where a segment has its flags, and the one that asks for a connection."""
# Classic BPF, see socket(7): to the system each line is a code, two jumps and an operand.
_NO_SYN = ctypes.create_string_buffer(
    b"".join(
        struct.pack("=HBBI", *line)
        for line in (
            (0x30, 0, 0, _FLAGS),  # load the flags
            (0x45, 0, 1, _SYN),  # skip the next line if SYN is not among them
            (0x06, 0, 0, 0),  # drop the segment
            (0x06, 0, 0, 0xFFFFFFFF),  # keep the segment
        )
    )
)
_PROGRAM = struct.pack("HP", 4, ctypes.addressof(_NO_SYN))


def shut_out(listening: socket.socket) -> None:
    """Let nobody begin to connect over TCP any more; Unix sockets know no handshakes.

    A client that comes from then on tries again after a second, and is refused, as the socket is
    closed by then, or finds who listens there next.
    """
    if listening.family != socket.AF_UNIX:
        with suppress(OSError):  # without it, those who come at the wrong moment are lost
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)


def last_connections(listening: socket.socket) -> Iterator[socket.socket]:
    """Let nobody connect any more, and give the connections that wait; the socket must not block.

    Over a Unix socket, who comes from then on is refused.
    """
    if listening.family == socket.AF_UNIX:
        listening.shutdown(socket.SHUT_RD)
    else:
        shut_out(listening)
    while True:
        try:
            yield listening.accept()[0]
        except ConnectionAbortedError:
            continue
        except OSError:  # there are no more, or none can be had
            return
