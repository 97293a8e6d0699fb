"""What a process sets for itself when it starts: descriptors, collector, threads."""

import resource
import subprocess
import sys

import pytest

HARD = 256
RAISE_LIMIT = """
import resource
from gateway.system.descriptors import descriptor_limit, raise_descriptor_limit
raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), descriptor_limit())
"""
OPEN_STANDARD = """
import os
os.close(0)
os.close(2)
from gateway.system.descriptors import open_standard_descriptors
open_standard_descriptors()
print([os.readlink(f"/proc/self/fd/{each}") for each in (0, 2)])
"""
TUNED = """
import gc, sys
gc.disable()
before = sys.getswitchinterval()
from gateway.system.memory import tune_garbage_collector, tune_thread_switches
tune_garbage_collector()
tune_thread_switches()
print(gc.isenabled(), gc.get_freeze_count() > 0, gc.get_threshold()[0] > 700)
print(sys.getswitchinterval() < 0.001 < before)
"""


def _run(code: str, soft: int = HARD) -> str:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, HARD))

    return subprocess.check_output([sys.executable, "-c", code], preexec_fn=limit, text=True)


@pytest.mark.parametrize("soft", [64, HARD])
def test_soft_limit_is_raised_to_the_hard_limit(soft: int) -> None:
    assert _run(RAISE_LIMIT, soft) == "256 256 256\n"


def test_closed_standard_descriptors_are_opened_so_that_no_socket_gets_their_number() -> None:
    assert _run(OPEN_STANDARD) == "['/dev/null', '/dev/null']\n"


def test_collector_passes_over_what_the_start_has_loaded_and_threads_switch_soon() -> None:
    assert _run(TUNED) == "True True True\nTrue\n"
