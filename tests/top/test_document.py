"""Documents of other versions: what is missing or of another type is empty."""

import pytest

from gateway.top import document

DOCUMENT = {"a": {"n": 1.5, "t": "x", "l": [{"k": 1}, 2, "s", None], "f": True}, "n": 10**400}


def test_what_is_there_is_read() -> None:
    assert document.number(DOCUMENT, "a", "n") == 1.5
    assert document.text(DOCUMENT, "a", "t") == "x"
    assert document.text(DOCUMENT, "a", "n") == "1.5"
    assert document.flag(DOCUMENT, "a", "f")
    assert document.objects(DOCUMENT, "a", "l") == [{"k": 1}]
    assert document.texts(DOCUMENT, "a", "l") == ["s"]
    assert document.numbers(DOCUMENT, "a", "l") == [None, 2.0, None, None]
    assert document.by_name({"r": {"a": 2, "b": 0, "c": "x"}}, "r") == {"a": 2.0}
    assert document.count(DOCUMENT, "a", "n") == 1


@pytest.mark.parametrize("path", [(), ("x",), ("a", "x"), ("a", "t", "x"), ("a", "l", "x"), ("n",)])
@pytest.mark.parametrize("given", [DOCUMENT, None, [], 3, "text", {"a": None}])
def test_what_is_not_there_is_empty(given: object, path: tuple[str, ...]) -> None:
    if given is DOCUMENT or path:
        assert document.number(given, *path) is None
        assert document.count(given, *path) == 0
        assert document.objects(given, *path) == []
        assert document.by_name(given, *path) == {}
        assert not document.flag(given, *path)


@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), "1", None, 10**400])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    assert document.as_number(value) is None
    assert document.count({"x": value}, "x") == 0


def test_a_count_is_never_negative() -> None:
    assert document.count({"x": -3}, "x") == 0
