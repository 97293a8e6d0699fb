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
    "pattern", ["", "re:[", "m[", "m[]", "m[!]", "m[b-a]", "[a]-[", "[a-c][c-a]"]
)
def test_an_invalid_pattern_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError):
        parse_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "ways"),
    [
        ("^resnet.*$", "'resnet*', or 're:^resnet.*$'"),
        ("^bert", "'bert', or 're:^bert'"),
        ("bert$", "'bert', or 're:bert$'"),
        ("resnet.*", "'resnet*', or 're:resnet.*'"),
        (r"resnet\.v.+", r"'resnet.v?*', or 're:resnet\.v.+'"),
        (r"v\d", r"'v[0-9]', or 're:v\d'"),
        (r"^.*-v\d[a-c]$", r"'*-v[0-9][a-c]', or 're:^.*-v\d[a-c]$'"),
        # No glob says these.
        (r"llama-\d+b", r"'re:llama-\d+b'"),
        ("(llama|bert)-7b", "'re:(llama|bert)-7b'"),
        ("[a-c]+", "'re:[a-c]+'"),
        ("^a{3}$", "'re:^a{3}$'"),
        ("^", "'re:^'"),
    ],
)
def test_regular_expression_without_its_prefix_is_warned_of(pattern: str, ways: str) -> None:
    assert parse_pattern(pattern) == pattern
    looks = f"'{pattern}' looks like a regular expression, but it is a glob, "
    assert pattern_warning(pattern) == f"{looks}where only * ? and [ ] have a meaning; write {ways}"


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("^resnet.*$", ["resnet", "resnet50", "a-resnet", "resnet.50"]),
        (r"v\d", ["v1", "va", "v", "v11"]),
        (r"resnet\.v.+", ["resnet.v1", "resnet.v", "resnet-v1", "resnet.v10"]),
        ("^.*-v[12]$", ["a-v1", "a-v3", "-v2"]),
    ],
)
def test_glob_that_is_proposed_matches_the_same(expression: str, names: list[str]) -> None:
    glob = pattern_warning(expression).partition("; write '")[2].partition("'")[0]
    meant = Pattern.of(f"re:{expression}")
    assert [Pattern.of(glob).matches(name) for name in names] == list(map(meant.matches, names))


@pytest.mark.parametrize(
    "pattern",
    ["resnet*", "[a-c]*", "resnet.v1", "com.acme[.]*", "a?b", "cost-$5", "re:^a.*$", "text/*"],
)
def test_glob_or_name_is_not_warned_of(pattern: str) -> None:
    assert pattern_warning(parse_pattern(pattern)) == ""
