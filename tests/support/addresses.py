"""Addresses where nobody listens until a test does."""

from __future__ import annotations

import os
import socket

_PID = os.getpid()
HOST = f"127.{64 + (_PID >> 16)}.{_PID >> 8 & 255}.{_PID & 255}"
"""A loopback address that no other test process uses; see ``free_port``."""
OTHER_HOST = f"127.{128 + (_PID >> 16)}.{_PID >> 8 & 255}.{_PID & 255}"
"""Another loopback address, where every port is free."""

_given: set[int] = set()


def free_port() -> int:
    """Return a port of HOST that is free and stays free.

    Servers that listen at any port and outgoing connections may take a free port at any time. In
    the tests those use 127.0.0.1, and so never a port of HOST.
    """
    while True:
        with socket.socket() as bound:
            bound.bind((HOST, 0))
            port = int(bound.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def free_address() -> str:
    """Return HOST with a free port, as HOST:PORT."""
    return f"{HOST}:{free_port()}"
