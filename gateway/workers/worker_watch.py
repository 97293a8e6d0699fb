"""Logs which workers hang: those whose event loops do not run any more."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_LOOKS = 5
"""Looks, a second apart, without a sign of life, after which a worker is said to hang."""
_MAX_SILENCE = 5_000
"""Milliseconds after which a worker whose event loop has not run leads the others no more."""

_log = logging.getLogger("tensorgate.workers")


@dataclass(eq=False)
class WorkerWatch:
    """Logs when another worker hangs, and when it runs again.

    ``pids`` has the process id of each worker, and ``heartbeats`` the time at which its event loop
    last ran, in ms on the clock of ``time.monotonic``. ``slot`` is the number of this worker.
    """

    pids: Sequence[memoryview]
    heartbeats: Sequence[memoryview]
    slot: int
    _last: dict[int, tuple[int, int]] = field(default_factory=dict, init=False)
    """The process and the heartbeat of each worker at the last look, by its slot."""
    _silent_looks: Counter[int] = field(default_factory=Counter, init=False)
    _logged: set[int] = field(default_factory=set, init=False)
    """The processes of which the log says that they hang."""

    def leads(self) -> bool:
        """Tell whether this worker is the first of those whose event loops run."""
        oldest = time.monotonic() * 1000 - _MAX_SILENCE
        return not any(heartbeat[0] > oldest for heartbeat in self.heartbeats[: self.slot])

    def look(self, leads: bool) -> None:
        """Look at the workers, once a second; one that ``leads`` the others logs what it sees.

        It counts its own looks: after a pause of all processes, none of them hangs.
        """
        for slot in range(len(self.pids)):
            pid, heartbeat = found = self.pids[slot][0], self.heartbeats[slot][0]
            if found == self._last.get(slot, (0, 0)):
                self._silent_looks[slot] += 1
            else:
                self._last[slot] = found
                self._silent_looks[slot] = 0
                if pid in self._logged:
                    self._logged.remove(pid)
                    _log.warning("worker %d runs again", pid)
            if leads and slot != self.slot and self._silent_looks[slot] >= _LOOKS:
                self._log_silence(pid, heartbeat)

    def _log_silence(self, pid: int, heartbeat: int) -> None:
        if pid not in self._logged and is_alive(pid):
            self._logged.add(pid)
            seconds = time.monotonic() - heartbeat / 1000
            text = "worker %d has not said anything for %.0f s: its calls wait meanwhile"
            _log.error(text, pid, seconds)


def is_alive(pid: int) -> bool:
    """Tell whether a worker's process lives; 0 stands for one that has not been started."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False  # another user's process is no worker
    return pid > 0
