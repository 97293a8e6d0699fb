"""Closes a listening socket without losing clients that are about to connect.

The kernel accepts a connection into the socket's queue, and the client may send its request before
the process calls accept(2). Closing the socket resets all connections in the queue, those that
arrive meanwhile, and those in a handshake. So three steps come first: drop new connection attempts,
wait for handshakes, and drain the queue.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

HANDSHAKE_TIMEOUT = 1.0
"""Seconds to wait for handshakes, as some never end; without any there is no wait."""
HANDSHAKE_POLL_INTERVAL = 0.002
"""Seconds before each look for handshakes; before the first, as a SYN may just have passed."""

_SO_ATTACH_FILTER = 26
_FLAGS, _SYN = 13, 0x02
"""RFC 9293, section 3.1: the offset of a segment's flags, and the flag SYN."""
# Classic BPF, see socket(7): each instruction is a code, two jumps and an operand.
_DROP_SYN = ctypes.create_string_buffer(
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
_PROGRAM = struct.pack("HP", 4, ctypes.addressof(_DROP_SYN))

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DUMP = 20, 0x301
"""sock_diag(7): the type of the request and of its results; the flags of a request for all."""
_DONE = 3
_SYN_RECEIVED = 3


def drop_new_connections(listening: socket.socket) -> None:
    """Drop the SYN of new TCP connections; a Unix socket has no handshake.

    The client's kernel sends SYN again after a second. By then the socket is closed, or another
    process listens there.
    """
    if listening.family != socket.AF_UNIX:
        with suppress(OSError):  # without the filter, a few clients may be reset
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)


def has_pending_handshakes(listening: socket.socket) -> bool:
    """Tell whether handshakes are in progress; True if the system does not say."""
    if listening.family == socket.AF_UNIX:
        return False
    # A header, then the filter: sockets of this family and port, in this state.
    header = struct.pack("=IHHII", 72, _BY_FAMILY, _DUMP, 0, 0)
    state = struct.pack("=BBBxI", listening.family, socket.IPPROTO_TCP, 0, 1 << _SYN_RECEIVED)
    port = struct.pack("!H46x", listening.getsockname()[1])
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as system:
            system.send(header + state + port)
            reply = system.recv(65536)
    except OSError:
        return True
    return bool(struct.unpack_from("=IH", reply)[1] != _DONE)


def drain_accept_queue(listening: socket.socket) -> Iterator[socket.socket]:
    """Yield the connections in the queue; the socket must be non-blocking.

    A Unix socket refuses new connections from now on.
    """
    if listening.family == socket.AF_UNIX:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RD)
    while True:
        try:
            yield listening.accept()[0]
        except ConnectionAbortedError:
            continue
        except OSError:  # the queue is empty, or accept fails
            return
