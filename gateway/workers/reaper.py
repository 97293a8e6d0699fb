"""Children that a process has not started: process 1 of a container gets those of dead parents."""

from __future__ import annotations

import os
from collections.abc import Collection


def reap_adopted_children(workers: Collection[int]) -> None:
    """Let those go that have ended, but for workers, whose statuses are told elsewhere.

    What ended behind such a worker is seen once that is let go.
    """
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in workers:
            return
        os.waitpid(found.si_pid, 0)
