import pytest

from gateway.app.build import processes
from gateway.app.build.processes import share_per_worker, uses_offload, worker_count
from gateway.settings.schema import Settings


def _settings(**said: object) -> Settings:
    return Settings.model_validate({"upstreams": {"u": {"endpoints": ["http://a:1"]}}, **said})


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 4)


@pytest.mark.parametrize(("said", "count"), [(1, 1), (3, 3), ("auto", 4)])
def test_so_many_processes_serve(said: int | str, count: int) -> None:
    assert worker_count(_settings(workers=said)) == count


@pytest.mark.parametrize(
    ("workers", "helper", "wanted"),
    [
        (1, "auto", True),
        (3, "auto", True),
        (4, "auto", False),
        ("auto", "auto", False),
        ("auto", "always", True),
        (1, "never", False),
    ],
)
def test_a_helper_where_cores_are_left(workers: int | str, helper: str, wanted: bool) -> None:
    assert uses_offload(_settings(workers=workers, offload=helper)) is wanted


@pytest.mark.parametrize(
    ("number", "workers", "part"),
    [(100, 1, 100), (100, "auto", 25), (7, "auto", 1), (1, "auto", 1), (100, 3, 33)],
)
def test_each_process_has_an_equal_part(number: int, workers: int | str, part: int) -> None:
    assert share_per_worker(number, worker_count(_settings(workers=workers))) == part
