"""File descriptors: their limit, and the standard ones."""

from __future__ import annotations

import errno
import os
import resource
import sys
from contextlib import suppress

_STANDARD = (0, 1, 2)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, if allowed.

    The soft limit is usually low, for programs that use select(2). The gateway does not.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems have another bound below the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """Return how many files and sockets this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def exceeds_share(descriptor: int, share: float) -> bool:
    """Tell from a new descriptor whether more than a share of the limit is open.

    POSIX: a new descriptor has the lowest free number.
    """
    return descriptor >= descriptor_limit() * share


def check_share(descriptor: int, share: float) -> None:
    """Raise OSError (EMFILE) if a new descriptor exceeds a share of the limit."""
    if exceeds_share(descriptor, share):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def exceeds_share_now(share: float) -> bool:
    """Tell whether a new descriptor would exceed a share of the limit."""
    try:
        descriptor = os.dup(_STANDARD[0])
    except OSError:
        return True
    os.close(descriptor)
    return exceeds_share(descriptor, share)


def open_standard_descriptors() -> None:
    """Open /dev/null at each standard descriptor that is closed.

    Otherwise the next socket would get its number, and with it what is logged.
    """
    for descriptor in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
