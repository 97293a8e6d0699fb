"""Starts commands of the gateway by fork: a process that has to import it first takes a second.

It imports nothing of the tests, and runs as a script with the gateway to test on its path. A
message on its socket is a command as JSON, with its standard output, its standard error, and a
socket that gets the id of the process, and its exit status when it has ended.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
from typing import Any

_MAX_MESSAGE = 1 << 20


def main(control: socket.socket) -> None:
    """Start processes until nobody can ask for more."""
    # Each process has them already.
    from gateway.admin import application  # noqa: F401
    from gateway.app import standalone, with_workers  # noqa: F401
    from gateway.cli import main as _  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _events in selector.select():
            if key.fileobj is control:
                message, fds, _flags, _address = socket.recv_fds(control, _MAX_MESSAGE, 3)
                if not message:
                    return
                pid = os.fork()
                if pid == 0:
                    _become(json.loads(message), fds)
                    return
                asker = socket.socket(fileno=fds[2])
                asker.send(b"%d\n" % pid)
                for fd in fds[:2]:
                    os.close(fd)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asker))
            else:
                pid, asker = key.data
                selector.unregister(key.fileobj)
                os.close(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with asker:
                    asker.send(b"%d\n" % status)


def _become(command: dict[str, Any], fds: list[int]) -> None:
    """Run a command in this new process, as if it had been started for it."""
    for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), *fds[:2])):
        os.dup2(fd, number)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, command["descriptors"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environ"])
    sys.argv = command["arguments"]
    exec(command["program"], {"__name__": "__main__"})


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
