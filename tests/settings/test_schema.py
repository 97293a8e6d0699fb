"""The JSON Schema of the settings, and config/schema.json, by which editors check them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from gateway.settings.json_schema import settings_schema
from gateway.settings.yaml_document import parse_yaml
from tests.settings.loading import read_invalid_files

CONFIG = Path(__file__).parents[2] / "config"
DEPLOY = Path(__file__).parents[2] / "deploy"
SCHEMA = Draft202012Validator(settings_schema())
MOST_WORDS = 25
WORDS = ("auto", "json", "least_request", "no_response")
"""Values with which a sentence may begin."""
SAMPLES = sorted(CONFIG.glob("*.yaml"))


def _errors(text: str) -> list[str]:
    value = parse_yaml(text, {}).value
    return [f"{error.json_path}: {error.message}" for error in SCHEMA.iter_errors(value)]


def test_config_schema_json_is_current_and_valid_json_schema() -> None:
    # If this fails: make schema
    assert json.loads((CONFIG / "schema.json").read_text()) == settings_schema()
    Draft202012Validator.check_schema(settings_schema())


def _raw(text: str) -> list[str]:
    """Return what an editor reports, which does not know the environment."""
    return [error.message for error in SCHEMA.iter_errors(yaml.safe_load(text))]


def _settings_in_manifests() -> list[str]:
    return [
        text
        for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(file.read_text())
        if document["kind"] == "ConfigMap"
        for text in document["data"].values()
    ]


def test_the_settings_in_manifests_are_valid_by_the_schema() -> None:
    assert [_raw(text) for text in _settings_in_manifests()] == [[], []]


def _with_values_from_the_environment(value: object) -> object:
    """Replace each value by a reference with that default."""
    match value:
        case dict():
            return {key: _with_values_from_the_environment(each) for key, each in value.items()}
        case list():
            return [_with_values_from_the_environment(each) for each in value]
    return "${A_NAME:-" + str(value) + "}"


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_a_sample_is_valid_by_the_schema_that_it_names(file: Path) -> None:
    """Also before references are replaced, and if every value comes from the environment."""
    text = file.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert _errors(text) == _raw(text) == []
    raw = _with_values_from_the_environment(yaml.safe_load(text))
    assert [error.message for error in SCHEMA.iter_errors(raw)] == []


UPSTREAM = "upstreams: {u: {endpoints: http://a:1}}\n"


@pytest.mark.parametrize(
    ("written", "is_valid"),
    [
        (UPSTREAM, True),
        (f"{UPSTREAM}forwarded: {{trusted_proxies: 10.0.0.0/8}}", True),
        (f"{UPSTREAM}routes: [{{upstream: u, match: {{operations: infer}}, auth: a}}]", True),
        (f"{UPSTREAM}routes: [{{upstream: u, retry_on: no_response}}]", True),
        (f"{UPSTREAM}watch: yes, please", False),
        (f"{UPSTREAM}watch: ${{}}", False),
        (f"{UPSTREAM}watch: 1", False),
        (f"{UPSTREAM}log: ${{LOG}}", False),
        (f"{UPSTREAM}workers: many", False),
        ("upstreams: ${UPSTREAMS}", False),
        (f"{UPSTREAM}routes: [{{upstream: u, deny_operations: nothing}}]", False),
        (f"{UPSTREAM}${{NAME}}: 1", False),
    ],
)
def test_sense_is_valid_by_the_schema_and_nonsense_is_not(written: str, is_valid: bool) -> None:
    assert (_raw(written) == []) is is_valid


@pytest.mark.parametrize("name", ["unknown keys", "routes of wrong shape", "no upstreams"])
def test_an_invalid_file_is_invalid_by_the_schema(name: str) -> None:
    assert _errors(read_invalid_files()[name].text) != []


def _properties(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    sections = {"": schema, **schema["$defs"]}
    return [
        (f"{section}.{name}", field)
        for section, each in sections.items()
        for name, field in each.get("properties", {}).items()
    ]


@pytest.mark.parametrize(
    ("name", "field"), [pytest.param(*each, id=each[0]) for each in _properties(settings_schema())]
)
def test_every_setting_is_described_in_short_sentences(name: str, field: dict[str, Any]) -> None:
    description = field["description"]
    sentences = description.split(". ")
    assert description.endswith(".")
    assert all(sentence[0].isupper() or sentence.startswith(WORDS) for sentence in sentences)
    assert max(len(sentence.split()) for sentence in sentences) <= MOST_WORDS


@pytest.mark.parametrize(
    ("section", "setting", "end"),
    [
        ("Limits", "max_request_bytes", "A size from 1KiB to 1TiB. The default is 64MiB."),
        ("Limits", "idle_timeout", "A duration from 1ms to 24h. The default is 5m."),
        ("Limits", "metadata_cache_size", "A whole number from 1 to 1000000. The default is 1024."),
        ("RouteLimits", "idle_timeout", "A duration from 1ms to 24h."),
        ("RetryBudget", "percent", "A percentage from 0% to 100%. The default is 50%."),
        (
            "OutlierDetection",
            "failure_statuses",
            "A whole number from 400 to 599. The default is 502, 503, 504.",
        ),
        ("Forwarded", "trusted_proxies", "The default is none."),
        ("Forwarded", "via", "The default is true."),
    ],
)
def test_a_description_ends_with_bounds_and_default(section: str, setting: str, end: str) -> None:
    field = settings_schema()["$defs"][section]["properties"][setting]
    assert field["description"].endswith(f" {end}")
