"""The limit of open files, which connections count against."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, if allowed.

    The soft limit is usually low, for programs that use select(2). The gateway does not.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems have another bound below the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
