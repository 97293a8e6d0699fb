"""config/schema.json is what editors check settings with."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway.settings.json_schema import settings_schema
from gateway.settings.yaml_source import read_source

CONFIG = Path(__file__).parents[2] / "config"
BROKEN = Path(__file__).parent / "broken"
SCHEMA = Draft202012Validator(settings_schema())
EXAMPLES = sorted(CONFIG.glob("*.yaml"))


def _errors(file: Path) -> list[str]:
    value = read_source(file.read_text(), {}).value
    return [f"{error.json_path}: {error.message}" for error in SCHEMA.iter_errors(value)]


def test_the_file_is_current() -> None:
    # If this fails: make schema
    assert json.loads((CONFIG / "schema.json").read_text()) == settings_schema()


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(settings_schema())


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_are_right_by_it(file: Path) -> None:
    assert _errors(file) == []


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_name_it_to_editors(file: Path) -> None:
    assert file.read_text().startswith("# yaml-language-server: $schema=schema.json\n")


@pytest.mark.parametrize("name", ["unknown_keys", "routes_of_wrong_shape", "no_upstreams"])
def test_what_is_wrong_is_wrong_by_it(name: str) -> None:
    assert _errors(BROKEN / f"{name}.yaml") != []


def _descriptions(schema: Any) -> list[str]:
    properties = [schema["properties"], *(each["properties"] for each in schema["$defs"].values())]
    return [field.get("description", "") for each in properties for field in each.values()]


def test_it_tells_what_each_setting_is() -> None:
    assert all(_descriptions(settings_schema()))
