import resource
import subprocess
import sys

import pytest

HARD = 256


@pytest.mark.parametrize("soft", [64, HARD])
def test_soft_limit_is_raised_to_the_hard_limit(soft: int) -> None:
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import resource;"
            " from gateway.system.descriptors import descriptor_limit, raise_descriptor_limit;"
            " raise_descriptor_limit();"
            " print(*resource.getrlimit(resource.RLIMIT_NOFILE), descriptor_limit())",
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, HARD)),
        capture_output=True,
        check=True,
    )
    assert said.stdout == b"256 256 256\n"


def test_closed_standard_descriptors_are_opened() -> None:
    """So that no socket gets their number."""
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys; os.close(0); os.close(2);"
            " from gateway.system.descriptors import open_standard_descriptors as occupy;"
            " occupy(); print([os.readlink(f'/proc/self/fd/{each}') for each in (0, 2)])",
        ],
        capture_output=True,
        check=True,
    )
    assert said.stdout == b"['/dev/null', '/dev/null']\n"
