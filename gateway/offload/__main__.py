"""The helper's own program: python -m gateway.offload SOCKET MEMORY, two descriptors.

The socket is its end of a pair, the memory what it shares with the gateway.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

from gateway.codec.elements.offloaded_work import run_job
from gateway.offload.slots import (
    DONE,
    MAX_RESULT_SIZE,
    MESSAGE,
    NOT_DONE,
    READY,
    MessageReader,
    SharedSlots,
    work_from_code,
)
from gateway.system.memory import tune_malloc

_READ = 64 * MESSAGE.size


def serve(sock: socket.socket, slots: SharedSlots) -> None:
    """Say that it is ready, then do what is asked for, in order, until the gateway closes."""
    sock.sendall(READY)
    reader = MessageReader()
    while data := sock.recv(_READ):
        for mark, slot, size in reader.feed(data):
            wanted = slots.is_pending(slot)
            result = run_job(work_from_code(mark), slots.work(slot, size)) if wanted else None
            if result is None or len(result) > MAX_RESULT_SIZE:
                sock.sendall(MESSAGE.pack(NOT_DONE, slot, 0))
            else:
                slots.put_result(slot, result)
                sock.sendall(MESSAGE.pack(DONE, slot, len(result)))


if __name__ == "__main__":
    tune_malloc()
    shared = SharedSlots(int(sys.argv[2]))
    os.close(int(sys.argv[2]))
    # A Ctrl-C is meant for the gateway, which closes when it is done; so is a wish for a reload.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Where writing fails, the gateway is gone.
    with socket.socket(fileno=int(sys.argv[1])) as end, suppress(ConnectionError):
        serve(end, shared)
