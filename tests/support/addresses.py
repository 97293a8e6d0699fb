"""Addresses at which nobody listens until the test does."""

from __future__ import annotations

import os
import socket

_PID = os.getpid()
HOST = f"127.{64 + (_PID >> 16)}.{_PID >> 8 & 255}.{_PID & 255}"
"""An address of this machine that no other run of the tests has; see free_address."""
OTHER_HOST = f"127.{128 + (_PID >> 16)}.{_PID >> 8 & 255}.{_PID & 255}"
"""Another one, where each port is free."""

_given: set[int] = set()


def free_port() -> int:
    """Give a port of HOST that is free, and stays so.

    A port that was found free can be taken a moment later: by a server that listens at any, or by
    a connection. Those of the tests have 127.0.0.1, and so no port of this host.
    """
    while True:
        with socket.socket() as bound:
            bound.bind((HOST, 0))
            port = int(bound.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def free_address() -> str:
    """Give HOST and such a port."""
    return f"{HOST}:{free_port()}"
