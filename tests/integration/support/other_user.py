"""Runs programs as a user who may do less than the one that runs the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

NOBODY = 65_534
_USER = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--pdeathsig=TERM")
# Python may be in the home of root. It is found then, but nothing can be written there.
_READS_ALL = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")


def as_nobody(python: Path) -> tuple[str, ...]:
    """Return what runs a command as nobody, which ends with the tests, too.

    Skips the test if that cannot be, or not with this Python, which the command needs.
    """
    setpriv = shutil.which("setpriv")
    if os.geteuid() or setpriv is None:
        pytest.skip("only root can run a program as another user, with setpriv of util-linux")
    found = f"import os, sys; sys.exit(not os.path.exists({str(python)!r}))"
    for more in (_READS_ALL, ()):
        command = (setpriv, *_USER, *more)
        if not subprocess.run([*command, python, "-c", found], check=False).returncode:
            return command
    pytest.skip(f"another user cannot run {python}")


@contextmanager
def folder_for_all() -> Iterator[Path]:
    """Make a folder that other users can read, unlike those of pytest."""
    with TemporaryDirectory(prefix="tensorgate-") as path:
        Path(path).chmod(0o755)
        yield Path(path)
