"""The last connections of a listening socket, before it is closed.

A client is connected once the system has put it into the socket's queue, and may have sent its
request: closing the socket would reset all that wait there, and those that come between the last
look at the queue and the close. So nobody is let in any more before that look. A client from afar
is reset if the last step of its handshake is on its way just then.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

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


def last_connections(listening: socket.socket) -> Iterator[socket.socket]:
    """Let nobody connect any more, and give the connections that wait; the socket must not block.

    A client that comes over TCP from then on tries again after a second, and is refused, as the
    socket is closed by then, or finds who listens there next. Over a Unix socket it is refused.
    """
    with suppress(OSError):  # without it, a few microseconds are left in which one may be lost
        if listening.family == socket.AF_UNIX:
            listening.shutdown(socket.SHUT_RD)
        else:
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)
    while True:
        try:
            yield listening.accept()[0]
        except ConnectionAbortedError:
            continue
        except OSError:  # there are no more, or none can be had
            return
