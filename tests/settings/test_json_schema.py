"""config/schema.json is what editors check settings with."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from gateway.settings.schema import settings_schema
from gateway.settings.yaml.loader import parse_yaml

CONFIG = Path(__file__).parents[2] / "config"
DEPLOY = Path(__file__).parents[2] / "deploy"
BROKEN = Path(__file__).parent / "broken"
SCHEMA = Draft202012Validator(settings_schema())
EXAMPLES = sorted(CONFIG.glob("*.yaml"))


def _errors(file: Path) -> list[str]:
    value = parse_yaml(file.read_text(), {}).value
    return [f"{error.json_path}: {error.message}" for error in SCHEMA.iter_errors(value)]


def test_the_file_is_current() -> None:
    # If this fails: make schema
    assert json.loads((CONFIG / "schema.json").read_text()) == settings_schema()


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(settings_schema())


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_are_right_by_it(file: Path) -> None:
    assert _errors(file) == []


def _raw(text: str) -> list[str]:
    """Give what an editor says of a file: it does not know the environment."""
    return [error.message for error in SCHEMA.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_are_right_by_it_before_references_are_replaced(file: Path) -> None:
    assert _raw(file.read_text()) == []


def _settings_in_manifests() -> list[str]:
    return [
        text
        for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(file.read_text())
        if document["kind"] == "ConfigMap"
        for text in document["data"].values()
    ]


def test_settings_in_manifests_are_right_by_it() -> None:
    assert [_raw(text) for text in _settings_in_manifests()] == [[], []]


def _with_values_from_the_environment(value: object) -> object:
    """Put a reference in the place of each value."""
    match value:
        case dict():
            return {key: _with_values_from_the_environment(each) for key, each in value.items()}
        case list():
            return [_with_values_from_the_environment(each) for each in value]
    return "${A_NAME:-" + str(value) + "}"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_value_may_come_from_the_environment(file: Path) -> None:
    raw = _with_values_from_the_environment(yaml.safe_load(file.read_text()))
    assert [error.message for error in SCHEMA.iter_errors(raw)] == []


@pytest.mark.parametrize(
    "written",
    [
        "watch: yes, please",
        "watch: $NAME",
        "watch: ${}",
        "watch: ${A b}",
        "watch: ${1A}",
        "watch: 1",
        "log: {level: loud}",
        "log: ${LOG}",
        "workers: many",
        "upstreams: ${UPSTREAMS}",
        "routes: ${ROUTES}",
        "routes: [{upstream: u, deny_operations: nothing}]",
        "routes: [{upstream: u, deny_operations: [nothing]}]",
        "routes: [{upstream: u, retry_on: 501}]",
        "models: {m: {inputs: [{name: a, datatype: FP8, shape: [1]}]}}",
        "models: {m: {inputs: [{name: a, datatype: FP32, shape: ['1']}]}}",
        "${NAME}: 1",
    ],
)
def test_nonsense_is_wrong_by_it(written: str) -> None:
    right = "upstreams: {u: {endpoints: http://a:1}}\n"
    assert _raw(right) == []
    assert _raw((right if "upstreams" not in written else "") + written) != []


@pytest.mark.parametrize(
    "written",
    [
        "upstreams: {u: {endpoints: ['http://a:1'], outlier_detection: {failure_statuses: 503}}}",
        "listen: 127.0.0.1:80",
        "forwarded: {trusted_proxies: 10.0.0.0/8}",
        "routes: [{upstream: u, match: {operations: infer}, deny_operations: repository, auth: a}]",
        "routes: [{upstream: u, retry_on: 503, compression: gzip}]",
        "routes: [{upstream: u, retry_on: unanswered}]",
    ],
)
def test_a_single_item_stands_for_a_list_of_one(written: str) -> None:
    right = "upstreams: {u: {endpoints: http://a:1}}\n"
    assert _raw((right if "upstreams" not in written else "") + written) == []


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_name_it_to_editors(file: Path) -> None:
    assert file.read_text().startswith("# yaml-language-server: $schema=schema.json\n")


@pytest.mark.parametrize("name", ["unknown_keys", "routes_of_wrong_shape", "no_upstreams"])
def test_what_is_wrong_is_wrong_by_it(name: str) -> None:
    assert _errors(BROKEN / f"{name}.yaml") != []


def _descriptions(schema: Any) -> list[str]:
    properties = [
        schema["properties"],
        *(each.get("properties", {}) for each in schema["$defs"].values()),
    ]
    return [field.get("description", "") for each in properties for field in each.values()]


def test_it_tells_what_each_setting_is() -> None:
    assert all(_descriptions(settings_schema()))
