"""The last connections of a listening socket, before it is closed.

A client is connected once the system has put it into the socket's queue, and may have sent its
request: closing the socket would reset all that wait there, those that come between the last look
at the queue and the close, and those whose handshake is under way. So nobody can begin to connect
any more first; then those who have begun come to an end; then the queue is emptied.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

HANDSHAKE_TIMEOUT = 1.0
"""Seconds for handshakes under way, at most: some never end. Without any, it takes no time."""
HANDSHAKE_POLL_INTERVAL = 0.002
"""Seconds until the next look whether handshakes are under way, and until the first, as the system
may just be at one that has passed the filter."""

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

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DUMP = 20, 0x301
"""See sock_diag(7): what asks about sockets, and those that tell of one; a request for all."""
_DONE = 3
_SYN_RECEIVED = 3


def drop_new_connections(listening: socket.socket) -> None:
    """Let nobody begin to connect over TCP any more; over a Unix socket there is no beginning.

    A client that comes from then on tries again after a second, and is refused, as the socket is
    closed by then, or finds who listens there next.
    """
    if listening.family != socket.AF_UNIX:
        with suppress(OSError):  # without it, those who come at the wrong moment are lost
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)


def has_pending_handshakes(listening: socket.socket) -> bool:
    """Tell whether clients have begun to connect; also true where the system does not tell."""
    if listening.family == socket.AF_UNIX:
        return False
    # A header, and what is asked for: sockets of this family and this port, in this state.
    header = struct.pack("=IHHII", 72, _BY_FAMILY, _DUMP, 0, 0)
    wanted = struct.pack("=BBBxI", listening.family, socket.IPPROTO_TCP, 0, 1 << _SYN_RECEIVED)
    port = struct.pack("!H46x", listening.getsockname()[1])
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as system:
            system.send(header + wanted + port)
            answer = system.recv(65536)
    except OSError:
        return True
    return bool(struct.unpack_from("=IH", answer)[1] != _DONE)


def drain_accept_queue(listening: socket.socket) -> Iterator[socket.socket]:
    """Let nobody connect any more, and give the connections that wait; the socket must not block.

    Over a Unix socket, who comes from then on is refused.
    """
    if listening.family == socket.AF_UNIX:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RD)
    while True:
        try:
            yield listening.accept()[0]
        except ConnectionAbortedError:
            continue
        except OSError:  # there are no more, or none can be had
            return
