"""How many files, connections among them, a process that serves may have open."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one, where that is allowed.

    It is low, as a rule, for the sake of programs that wait with select(2), which this is none of.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may have its own bound below the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
