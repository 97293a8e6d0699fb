"""The JSON Schema of the settings, and config/schema.json, by which editors check them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from gateway.settings.json_schema import settings_schema
from gateway.settings.yaml_document import parse_yaml
from tests.settings.invalid_files import read_invalid_files

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


def test_config_schema_json_is_current() -> None:
    # If this fails: make schema
    assert json.loads((CONFIG / "schema.json").read_text()) == settings_schema()


def test_the_schema_is_valid_json_schema() -> None:
    Draft202012Validator.check_schema(settings_schema())


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_the_samples_are_valid_by_the_schema(file: Path) -> None:
    assert _errors(file.read_text()) == []


def _raw(text: str) -> list[str]:
    """Return what an editor reports, which does not know the environment."""
    return [error.message for error in SCHEMA.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_the_samples_are_valid_before_references_are_replaced(file: Path) -> None:
    assert _raw(file.read_text()) == []


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
def test_every_value_may_come_from_the_environment(file: Path) -> None:
    raw = _with_values_from_the_environment(yaml.safe_load(file.read_text()))
    assert [error.message for error in SCHEMA.iter_errors(raw)] == []


@pytest.mark.parametrize(
    "written",
    [
        "watch: yes, please",
        "watch: ${}",
        "watch: 1",
        "log: ${LOG}",
        "workers: many",
        "upstreams: ${UPSTREAMS}",
        "routes: [{upstream: u, deny_operations: nothing}]",
        "upstreams: {u: {endpoints: ['http://a:1'], retry_stale: never}}",
        "models: {m: {inputs: [{name: a, datatype: FP8, shape: [1]}]}}",
        "${NAME}: 1",
    ],
)
def test_nonsense_is_invalid_by_the_schema(written: str) -> None:
    right = "upstreams: {u: {endpoints: http://a:1}}\n"
    assert _raw(right) == []
    assert _raw((right if "upstreams" not in written else "") + written) != []


@pytest.mark.parametrize(
    "written",
    [
        "upstreams: {u: {endpoints: ['http://a:1'], outlier_detection: {failure_statuses: 503}}}",
        "forwarded: {trusted_proxies: 10.0.0.0/8}",
        "routes: [{upstream: u, match: {operations: infer}, deny_operations: repository, auth: a}]",
        "routes: [{upstream: u, retry_on: no_response}]",
    ],
)
def test_sense_is_valid_by_the_schema(written: str) -> None:
    right = "upstreams: {u: {endpoints: http://a:1}}\n"
    assert _raw((right if "upstreams" not in written else "") + written) == []


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_the_samples_name_the_schema_to_editors(file: Path) -> None:
    assert file.read_text().startswith("# yaml-language-server: $schema=schema.json\n")


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
