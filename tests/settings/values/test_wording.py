import pytest

from gateway.settings.values.wording import closest_name, did_you_mean, suggest

KNOWN = ("triton", "idle_timeout", "least_request", "round_robin", "FP32", "BYTES", "warning")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Triton", "triton"),
        ("Triton Inference Server", "triton"),
        ("tritn", "triton"),
        ("idleTimeout", "idle_timeout"),
        ("idel_timeout", "idle_timeout"),
        ("LEAST_CONN", "least_request"),
        ("float32", "FP32"),
        ("warn", "warning"),
    ],
)
def test_the_closest_known_name_is_found(name: str, meant: str) -> None:
    assert closest_name(name, KNOWN) == meant


@pytest.mark.parametrize("name", ["", "x", "time", "vllm", "-", 7, None, True, "a" * 100_000])
def test_an_unlike_name_has_no_closest_name(name: object) -> None:
    assert closest_name(name, KNOWN) is None
    assert did_you_mean(name, KNOWN) == ""


def test_suggest_lists_all_names_if_none_is_close() -> None:
    assert suggest("tritn", KNOWN[:2]) == "; did you mean triton?"
    assert suggest("vllm", KNOWN[:2]) == "; known: triton, idle_timeout"


def test_a_known_name_in_quotes_is_proposed_without_them() -> None:
    assert did_you_mean("503", ["502", "503"]) == "; did you mean 503, without quotes?"
