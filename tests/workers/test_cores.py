import os
from pathlib import Path

import pytest

from gateway.workers.cores import usable_cores


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000\n", 8),
        ("400000 100000\n", 4),
        ("150000 100000\n", 2),
        ("1000 100000\n", 1),
        ("1600000 100000\n", 8),
        ("", 8),
        ("what?\n", 8),
    ],
)
def test_a_quota_counts_as_cores(tmp_path: Path, quota: str, cores: int) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(quota)
    assert usable_cores(path) == cores


@pytest.mark.usefixtures("eight_cores")
def test_without_a_quota_it_is_the_cores_of_the_process(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none") == 8


def test_there_is_at_least_one_here() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
