"""Parents as programs of their own, as they fork."""

import sys

PROGRAM = """
import gc, logging, os, signal, socket, sys, time
from gateway.workers import supervisor
from gateway.workers.supervisor import NoWorkerError, Supervisor
from gateway.workers.ipc import ADMIN, CLIENT

logging.basicConfig(level="INFO", format="%(message)s")

class Events:
    def begun(self, workers):
        print("begun", *workers, file=sys.stderr, flush=True)

    def stopping(self):
        print("stopping", file=sys.stderr, flush=True)

def work(post):
    {work}

supervisor._LAST_MOMENT = {last_moment}
try:
    sock = socket.create_server(("127.0.0.1", 0))
    print("dropped", Supervisor({{sock: CLIENT}}, {workers}, work, 0.1, Events()).run())
except NoWorkerError as error:
    print(error)
"""


def command(work: str, workers: int, last_moment: float = 30) -> tuple[str, ...]:
    """Give the command of a parent whose workers do ``work``, lines of Python."""
    program = PROGRAM.format(work=work, workers=workers, last_moment=last_moment)
    return (sys.executable, "-c", program)
