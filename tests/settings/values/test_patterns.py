import pytest

from gateway.routing.matcher import Pattern
from gateway.settings.values.patterns import parse_pattern


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("m", "m"),
        ("*", "m"),
        ("m[]x]", "m]"),
        ("m[!]]", "mx"),
        ("m[!a-z]", "m7"),
        ("m]", "m]"),
        ("m[a-c]-[0-9]", "mb-7"),
        ("re:", ""),
        ("re:m[]x]+", "m]x"),
    ],
)
def test_a_valid_pattern_can_be_compiled(pattern: str, name: str) -> None:
    assert Pattern.of(parse_pattern(pattern)).matches(name)


@pytest.mark.parametrize(
    "pattern", ["", "re:[", "m[", "m[]", "m[!]", "m[b-a]", "[a]-[", "[a-c][c-a]"]
)
def test_an_invalid_pattern_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError):
        parse_pattern(pattern)
