import pytest

from gateway.settings.problems import UnreadableError
from gateway.settings.yaml_document import INVALID, MAX_NODES, Position, expand, parse_yaml


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("5", 5),
        ("true", True),
        ("null", None),
        ("text", "text"),
        ("''", ""),
        # YAML 1.1 has a surprise for each of these.
        ("yes", "yes"),
        ("010", "010"),
        ("1_000", "1_000"),
        (".inf", ".inf"),
        ("9" * 5000, "9" * 5000),
        # What comes from the environment is typed like what stands in the file.
        ("'${FIVE}'", "5"),
        ("${NONE:-true}", True),
        ("${YAML}", "[a, {b: c}] # d"),
        ("$${FIVE}", "${FIVE}"),
    ],
)
def test_scalars_are_typed_without_surprises(written: str, value: object) -> None:
    source = parse_yaml(f"key: {written}\n", {"FIVE": "5", "YAML": "[a, {b: c}] # d"})
    assert source.value == {"key": value}
    assert not source.problems


def test_keys_are_text_and_are_not_expanded() -> None:
    assert parse_yaml("{8080: a, no: b, ~: c, 1.0: d, '${E}': e}", {}).value == {
        "8080": "a",
        "no": "b",
        "~": "c",
        "1.0": "d",
        "${E}": "e",
    }


def test_values_have_the_positions_of_their_keys_and_items_their_own() -> None:
    source = parse_yaml("a:\n  b: [1,\n    {c: 2}]\n", {})
    assert source.positions == {
        ("a",): Position(1, 1),
        ("a", "b"): Position(2, 3),
        ("a", "b", 0): Position(2, 7),
        ("a", "b", 1): Position(3, 5),
        ("a", "b", 1, "c"): Position(3, 6),
    }


def test_an_alias_has_the_position_of_its_use() -> None:
    source = parse_yaml("a: &x {b: 1}\nc: *x\n", {})
    assert source.value == {"a": {"b": 1}, "c": {"b": 1}}
    assert source.positions["c",] == Position(2, 1)
    assert source.positions["c", "b"] == Position(1, 8)


def test_merged_entries_rank_below_own_entries_and_in_their_order() -> None:
    source = parse_yaml(
        "a: &a {x: a, y: a, z: a}\n"
        "b: &b {x: b, w: b}\n"
        "c: {<<: [*b, *a], z: c}\n"
        "d: {<<: *b, x: d}\n",
        {},
    )
    assert isinstance(source.value, dict)
    assert source.value["c"] == {"z": "c", "x": "b", "w": "b", "y": "a"}
    assert source.value["d"] == {"x": "d", "w": "b"}
    assert source.positions["c", "y"] == Position(1, 14)


def test_a_quoted_merge_key_is_a_key() -> None:
    assert parse_yaml("'<<': {a: 1}", {}).value == {"<<": {"a": 1}}


def test_a_value_with_a_problem_is_invalid_and_the_rest_is_read() -> None:
    source = parse_yaml("a: ${NONE}\nb: 1\nb: 2\nc: ${EMPTY}\n", {"EMPTY": ""})
    assert source.value == {"a": INVALID, "b": 1, "c": INVALID}
    assert [(each.setting, each.line, each.column) for each in source.problems] == [
        ("a", 1, 4),
        ("b", 3, 1),
        ("c", 4, 4),
    ]


def test_an_error_that_aliases_repeat_is_reported_once() -> None:
    source = parse_yaml("a: &a {b: '${NONE}', b: 1}\nc: *a\nd: {<<: *a}\n", {})
    assert [each.line for each in source.problems] == [1, 1]


BILLION_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
MERGED_LAUGHS = (
    f"a: &a {{{', '.join(f'k{i}: 1' for i in range(1000))}}}\nb: {{<<: [{'*a, ' * 1000}]}}\n"
)
LONG_CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 1500))
LONG_MERGE_CHAIN = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: *a{i - 1}}}\n" for i in range(1, 1500)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BILLION_LAUGHS, f"more than {MAX_NODES} keys and values"),
        (MERGED_LAUGHS, f"more than {MAX_NODES} keys and values"),
        ("[" + "1, " * 20_000 + "]", f"more than {MAX_NODES} keys and values"),
        (LONG_CHAIN, "nested deeper than 32 levels"),
        (LONG_MERGE_CHAIN, f"more than {MAX_NODES} keys and values"),
        ("[" * 100_000, "nested deeper than 32 levels"),
        ("%YAML 1." + "1" * 5000 + "\n---\n", "not valid YAML: a number out of range"),
        ("a: &a [*a]", "*a stands inside what it names"),
        ("a: &a {<<: *a}", "*a stands inside what it names"),
    ],
    ids=lambda text: text[:12],
)
def test_a_file_beyond_the_caps_is_unreadable(text: str, message: str) -> None:
    with pytest.raises(UnreadableError) as error:
        parse_yaml(text, {})
    assert error.value.problem.message == message
    assert error.value.problem.line is not None


ENVIRON = {"HOST": "triton", "PORT": "8000", "EMPTY": "", "TRICK": "${HOST}"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$HOST costs $5", "$HOST costs $5"),
        ("${HOST}", "triton"),
        ("http://${HOST}:${PORT}", "http://triton:8000"),
        ("${HOST:-other}", "triton"),
        ("${NONE:-other}", "other"),
        ("${NONE:-:-}", ":-"),
        ("${EMPTY:-other}", "other"),
        ("$${HOST}", "${HOST}"),
        ("${TRICK}", "${HOST}"),
    ],
)
def test_references_are_replaced_from_the_environment(text: str, expanded: str) -> None:
    assert expand(text, ENVIRON) == expanded
