import os
from pathlib import Path

import pytest

from gateway.app.build.worker_count import (
    offload_threads,
    offload_warnings,
    share_per_worker,
    usable_cores,
    worker_count,
)
from gateway.settings.schema import Settings


def _settings(**more: object) -> Settings:
    return Settings.model_validate({"upstreams": {"u": {"endpoints": ["http://a:1"]}}, **more})


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.app.build.worker_count.usable_cores", lambda: 4)


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("workers", "count"), [(1, 1), (3, 3), ("auto", 4)])
def test_worker_count_is_the_setting_or_the_cores(workers: int | str, count: int) -> None:
    assert worker_count(_settings(workers=workers)) == count


@pytest.mark.parametrize(
    ("cores", "workers", "offload", "threads"),
    [
        (1, 1, "auto", 0),
        (2, 1, "auto", 1),
        (64, 1, "auto", 4),
        (4, 2, "auto", 1),
        (4, 5, "auto", 0),
        (4, "auto", "auto", 0),
        (4, "auto", 2, 2),
        (64, 1, 0, 0),
    ],
)
def test_threads_are_a_worker_s_share_of_spare_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int | str, offload: object, threads: int
) -> None:
    monkeypatch.setattr("gateway.app.build.worker_count.usable_cores", lambda: cores)
    monkeypatch.setattr("gateway.app.build.worker_count.NATIVE", True)
    assert offload_threads(_settings(workers=workers, offload=offload)) == threads


@pytest.mark.parametrize(("offload", "warns"), [("auto", False), (0, False), (4, True)])
def test_there_are_no_threads_without_the_c_module(
    monkeypatch: pytest.MonkeyPatch, offload: object, warns: bool
) -> None:
    monkeypatch.setattr("gateway.app.build.worker_count.NATIVE", False)
    assert offload_threads(_settings(offload=offload)) == 0
    warnings = [why for _, why in offload_warnings(_settings(offload=offload))]
    assert any("not compiled" in why for why in warnings) is warns


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("number", "workers", "share"),
    [(100, "auto", 25), (7, "auto", 1), (1, "auto", 1), (100, 3, 33)],
)
def test_workers_have_equal_shares(number: int, workers: int | str, share: int) -> None:
    assert share_per_worker(number, worker_count(_settings(workers=workers))) == share


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000\n", 8),
        ("150000 100000\n", 2),
        ("1000 100000\n", 1),
        ("1600000 100000\n", 8),
        ("what?\n", 8),
    ],
)
def test_cpu_quota_counts_as_cores(tmp_path: Path, quota: str, cores: int) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(quota)
    assert usable_cores(path) == cores


@pytest.mark.usefixtures("eight_cores")
def test_without_a_quota_the_cores_of_the_process_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none") == 8
