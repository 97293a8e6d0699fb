"""The offload process: python -m gateway.offload SOCKET MEMORY, two inherited descriptors.

It converts what the worker writes into the shared memory, in order, until the socket is closed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

from gateway.codec.elements.run_job import run_job
from gateway.offload.slots import (
    DONE,
    MAX_RESULT_SIZE,
    MESSAGE,
    NOT_DONE,
    READY,
    MessageReader,
    SharedSlots,
    decode_job,
)
from gateway.system.memory import tune_malloc

_READ_SIZE = 64 * MESSAGE.size


def serve(sock: socket.socket, slots: SharedSlots) -> None:
    """Send READY, then do the jobs in order, until the worker closes the socket."""
    sock.sendall(READY)
    reader = MessageReader()
    while data := sock.recv(_READ_SIZE):
        for code, slot, size in reader.feed(data):
            is_pending = slots.is_pending(slot)
            result = run_job(decode_job(code), slots.job_data(slot, size)) if is_pending else None
            if result is None or len(result) > MAX_RESULT_SIZE:
                sock.sendall(MESSAGE.pack(NOT_DONE, slot, 0))
            else:
                slots.write_result(slot, result)
                sock.sendall(MESSAGE.pack(DONE, slot, len(result)))


if __name__ == "__main__":
    tune_malloc()
    shared = SharedSlots(int(sys.argv[2]))
    os.close(int(sys.argv[2]))
    # Ctrl-C and SIGHUP are for the worker, which closes the socket when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # If sending fails, the worker is gone.
    with socket.socket(fileno=int(sys.argv[1])) as end, suppress(ConnectionError):
        serve(end, shared)
