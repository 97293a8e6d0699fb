from typing import Any

import pytest

from gateway.protocol.operations import ModelName
from gateway.upstream.pool.member import ANY_MODEL, ReadyModels
from gateway.upstream.pool.model_discovery import parse_ready_models
from tests.support.doubles.streaming import ready


def _entry(name: str, version: object = None, state: str = "READY") -> dict[str, Any]:
    return {"name": name, "version": version, "state": state}


@pytest.mark.parametrize(
    ("document", "models"),
    [
        ([], ready()),
        ([{"name": "m"}], ready("m")),
        ([_entry("m", "1"), _entry("m", "2"), _entry("n", "1")], ready("m/1", "m/2", "n/1")),
        ([_entry("m", 7)], ready("m/7")),
        (
            [_entry("m", "1"), _entry("m", "2", "UNAVAILABLE"), _entry("n", "1", "LOADING")],
            ready("m/1"),
        ),
        # One entry without a version is enough: the model may have other versions.
        ([_entry("m", "1"), _entry("m")], ready("m")),
        ([_entry("m", "")], ready("m")),
        ({"models": ["a", "b"]}, ready("a", "b")),
    ],
)
def test_lists_of_models_are_parsed(document: Any, models: ReadyModels) -> None:
    assert parse_ready_models(document) == models


@pytest.mark.parametrize("document", [5, {}, {"models": [1]}, [1], [{"state": "READY"}]], ids=repr)
def test_other_documents_are_errors(document: Any) -> None:
    with pytest.raises((TypeError, KeyError, AttributeError)):
        parse_ready_models(document)


@pytest.mark.parametrize(
    ("models", "name", "version", "have"),
    [
        (ready("m/1", "m/2"), "m", None, True),
        (ready("m/1", "m/2"), "m", "2", True),
        (ready("m/1", "m/2"), "m", "3", False),
        (ready("m/1"), "n", None, False),
        (ready("m/1"), "n", "1", False),
        (ready("m"), "m", "3", True),
        (ANY_MODEL, "", None, True),
        (ANY_MODEL, "anything", "3", True),
    ],
)
def test_ready_models_include_model_and_version(
    models: ReadyModels, name: str, version: str | None, have: bool
) -> None:
    assert models.includes(ModelName(name, version)) is have


def test_names_are_sorted() -> None:
    assert ready("b/1", "a/2", "a/1").names == ("a", "b")
    assert ANY_MODEL.names is None
