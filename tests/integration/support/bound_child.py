"""Become a command that is told to end when its parent ends, however that happens (Linux only).

Usage: bound_child.py PARENT_PID COMMAND ...
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
# The parent may have ended before the call above.
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
