"""For any file, `load` gives Settings or SettingsError."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.settings.load import load
from gateway.settings.problems import Problem, SettingsError
from gateway.settings.schema import Settings
from tests.support.scale import scaled

ENVIRON = {"SET": "64", "EMPTY": "", "ODD": "\udc80\n"}
KEYS = [
    *Settings.model_fields,
    *("endpoints", "dialect", "upstream", "nonfinite", "bytes", "level", "access", "match"),
    *("model", "version", "headers", "operations", "name", "weight", "sticky_header", "rewrite"),
    *("max_request_bytes", "max_json_depth", "idle_timeout", "triton", "<<", "a b", ""),
]
SCALARS = [
    *("triton", "http://127.0.0.1:8000", "127.0.0.1:8080", "unix:/s", "64MiB", "5s", "null"),
    *("re:(", "re:a", "[", "[z-a]", "infer", "x-user"),
    *("${SET}", "${EMPTY}", "${ODD}", "${NONE}", "${NONE:-1}", "${", "yes", "12:30", "", "\ud800"),
]
MARKS = [
    *"[]{},:-?&*!|>'\"%@`#$ \n\t\\~",
    *("${", "<<", "---", "...", "&a", "*a", "!!int", "\\U", "\\x"),
]

keys = st.sampled_from(KEYS) | st.text(max_size=5)
scalars = (
    st.sampled_from(SCALARS)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
fragments = st.lists(st.sampled_from([*MARKS, *KEYS, *SCALARS, "1", "F" * 8, "\n  ", ": "])).map(
    "".join
)
free = settings(
    suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture],
    max_examples=scaled(300),
)


def check_problems(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    last_line = len(content.decode(errors="replace").splitlines()) + 1
    for problem in problems(file):
        assert problem.line is None or 1 <= problem.line <= last_line
        assert "nput should" not in problem.message
        assert problem.describe(file).isprintable()


def problems(file: Path) -> tuple[Problem, ...]:
    try:
        load(file, ENVIRON)
    except SettingsError as error:
        return error.problems
    return ()


@free
@given(st.text())
@example('a: "\\U00110000"')
@example('a: "\\UFFFFFFFF"')
@example('"\\ud800": 1')
@example("%YAML 1." + "1" * 5000 + "\n---\n")
def test_any_text_loads_or_gives_errors(file: Path, content: str) -> None:
    check_problems(file, content.encode(errors="surrogatepass"))


@free
@given(fragments)
def test_any_yaml_like_text_loads_or_gives_errors(file: Path, content: str) -> None:
    check_problems(file, content.encode(errors="surrogatepass"))


@free
@given(st.dictionaries(st.sampled_from([*Settings.model_fields, "other"]), trees))
def test_any_tree_loads_or_gives_errors(file: Path, tree: dict[str, Any]) -> None:
    check_problems(file, yaml.safe_dump(tree, allow_unicode=False).encode())
