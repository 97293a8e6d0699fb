"""Supervisors as programs of their own, as they fork."""

import sys

PROGRAM = """
import os, signal, socket, sys, time
import logging
from gateway.workers import supervisor
from gateway.workers.ipc import FromWorker, ToWorker, receive
from gateway.workers.supervisor import NoWorkerError, Supervisor

logging.basicConfig(level="INFO", format="%(message)s")

class Gateway:
    drain_timeout = 0.1

    def run(self, channel, serves):
        main(channel) if serves == ToWorker.CLIENT else admin_main(channel)

    def poll(self, requested):
        return None

    def on_applied(self, late):
        pass

    def on_started(self, workers):
        os.write(2, f"started {{' '.join(map(str, workers))}}\\n".encode())  # whole, unlike print

    def on_stopping(self):
        print("stopping", file=sys.stderr, flush=True)

    def on_worker_ended(self, process, why):
        pass

    def on_worker_restarted(self, process):
        pass

def next_message(channel):
    return receive(channel.channel)

def main(channel):
    {main}

def admin_main(channel):
    {admin}

supervisor._KILL_DELAY = {kill_delay}
try:
    sock = socket.create_server(("127.0.0.1", 0))
    gateway, admin_sockets = Gateway(), {{}}
    {setup}
    gateway.sockets = {{sock: ToWorker.CLIENT, **admin_sockets}}
    print("dropped", Supervisor({workers}, gateway).run())
except NoWorkerError as error:
    print(error)
except KeyboardInterrupt:
    print("interrupted")
"""

COUNTING_WORKER = """
channel.send(FromWorker.READY); got = 0
while (message := next_message(channel)) and message[0] != ToWorker.DRAIN:
    if message[0] == ToWorker.CLIENT:
        got += 1; channel.send(FromWorker.RECEIVED)
channel.send(FromWorker.DROPPED, str(got))
"""
"""A worker that reports how many clients it got, as if it had cut so many calls."""


def command(
    main: str, workers: int, kill_delay: float = 30, setup: str = "pass", admin: str = "pass"
) -> tuple[str, ...]:
    """Return the command of a supervisor; its workers run ``main``, lines of Python.

    ``setup`` are lines that run before it starts. They may set ``gateway`` and ``admin_sockets``.
    The admin process runs ``admin``.
    """
    program = PROGRAM.format(
        main=_indented(main),
        admin=_indented(admin),
        workers=workers,
        kill_delay=kill_delay,
        setup=_indented(setup),
    )
    return (sys.executable, "-c", program)


def _indented(lines: str) -> str:
    return lines.strip("\n").replace("\n", "\n    ")
