"""TCP handshakes that stay incomplete, as those of distant clients may."""

from __future__ import annotations

import ctypes
import socket
import struct

_SO_ATTACH_FILTER = 26
# As in gateway/system/accept_queue.py, the other way round: only what asks for a connection stays.
_ONLY_SYN = ctypes.create_string_buffer(
    struct.pack("=HBBI", 0x30, 0, 0, 13)
    + struct.pack("=HBBI", 0x45, 1, 0, 0x02)
    + struct.pack("=HBBI", 0x06, 0, 0, 0)
    + struct.pack("=HBBI", 0x06, 0, 0, 0xFFFFFFFF)
)


def stall_handshakes(listening: socket.socket) -> None:
    """Let a socket hear nothing of what ends a handshake, until it has another filter.

    To a client it looks as if it were connected. Behind the other filter, the first that it sends
    ends its handshake; where it sends nothing, its system is asked again after a second.
    """
    program = struct.pack("HP", 4, ctypes.addressof(_ONLY_SYN))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
