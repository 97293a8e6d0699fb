"""The garbage collector of a process that serves."""

import subprocess
import sys

TUNED = """
import gc
gc.disable()
from gateway.system.memory import tune_garbage_collector
tune_garbage_collector()
print(gc.isenabled(), gc.get_freeze_count() > 0, gc.get_threshold()[0] > 700)
"""


def test_garbage_collector_is_enabled_and_passes_over_what_the_start_has_loaded() -> None:
    command = [sys.executable, "-c", TUNED]
    assert subprocess.check_output(command, text=True) == "True True True\n"
