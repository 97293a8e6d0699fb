import pytest

from gateway.routing.matcher import Pattern
from gateway.settings.values.patterns import parse_pattern, pattern_warning


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
    "pattern",
    ["^bert", "bert$", "resnet.*", "v.+", r"llama-\d+b", "(llama|bert)-7b", "[a-c]+", "^"],
)
def test_regular_expression_without_its_prefix_is_warned_of(pattern: str) -> None:
    assert parse_pattern(pattern) == pattern
    looks = f"'{pattern}' looks like a regular expression, but it is a glob, "
    written = f"where only * ? and [ ] have a meaning; an expression is written 're:{pattern}'"
    assert pattern_warning(pattern) == looks + written


@pytest.mark.parametrize(
    "pattern",
    ["resnet*", "[a-c]*", "resnet.v1", "com.acme[.]*", "a?b", "cost-$5", "re:^a.*$", "text/*"],
)
def test_glob_or_name_is_not_warned_of(pattern: str) -> None:
    assert pattern_warning(parse_pattern(pattern)) == ""
