"""Parameters of queries: what can be read, and errors that name the parameter."""

import pytest

from gateway.admin.panels.query import parse_count, parse_number, parse_text


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("007", 7), ("12", 12), ("999", 100), ("", 5), (None, 5)]
)
def test_count_is_bounded(text: str | None, number: int) -> None:
    query = {} if text is None else {"limit": text}
    assert parse_count(query, "limit", 5, 100) == number


@pytest.mark.parametrize(
    "text", ["-1", "+1", "1.0", "1e3", "1_0", " 1", "x", "١", "²", "0x1", "9" * 5000]
)
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^limit: expected a number, got ") as caught:
        parse_count({"limit": text}, "limit", 5)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("1.5", 1.5), ("-2e3", -2000), ("", None)])
def test_number_may_have_a_fraction(text: str, number: float | None) -> None:
    assert parse_number({"min_ms": text}, "min_ms") == number
    assert parse_number({}, "min_ms") is None


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "x", "1,5", "x" * 5000])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^min_ms: expected a number, got ") as caught:
        parse_number({"min_ms": text}, "min_ms")
    assert len(str(caught.value)) < 200


def test_text_is_cut() -> None:
    assert parse_text({"search": "x" * 5000}, "search") == "x" * 500
    assert parse_text({}, "search") == ""
