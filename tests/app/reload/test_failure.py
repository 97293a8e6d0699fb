"""What an operator reads of a reload that failed."""

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.app.build.listen import ListenError
from gateway.app.reload.failure import failure_reason, failure_text
from gateway.app.reload.source import SettingsSource
from gateway.errors import INTERNAL_ERROR_TEXT
from gateway.settings.problems import SettingsError

_NO_MORE_THREADS = """
import resource, threading
from gateway.app.reload.failure import failure_reason
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**20, resource.RLIM_INFINITY))
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    print(failure_reason(error))
"""


def test_failure_text_has_the_first_problem(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("upstreams: {u: {endpoints: []}}\nlisten: 1\n")
    with pytest.raises(SettingsError) as caught:
        SettingsSource(file, {}).read()
    text = failure_text(caught.value, file)
    assert text.startswith(f"{file}:1: upstreams.u.endpoints: ")
    assert text.endswith(" (2 problems)")
    assert failure_text(ListenError("no luck"), file) == f"{file}: no luck"


def test_failure_text_has_the_misspelt_key_and_not_the_one_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "upstreams: {u: {endpoints: ['http://a:1']}, v: {endpoints: ['http://b:1']}}\n"
        "routes: [{upstream: [{name: u, weight: 60}, {name: v, weigt: 40}]}]\n"
    )
    with pytest.raises(SettingsError) as caught:
        SettingsSource(file, {}).read()
    expected = "routes[0].upstream[1].weigt: unknown key; did you mean weight? (2 problems)"
    assert failure_text(caught.value, file) == f"{file}:2: {expected}"


def test_limit_of_the_system_is_a_plain_reason(caplog: pytest.LogCaptureFixture) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _NO_MORE_THREADS], capture_output=True, check=True, text=True
    )
    assert ran.stdout.startswith("the system allows no more threads: ")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            os.open("/", os.O_RDONLY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    reason = "the system refuses a part of the new settings: Too many open files"
    assert failure_reason(caught.value) == reason
    assert not caplog.records


def test_unexpected_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert failure_reason(RuntimeError("no luck")) == INTERNAL_ERROR_TEXT
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "RuntimeError: no luck" in caplog.text
