"""The settings of the keys by which clients are let in: where they are, not the keys themselves."""

import re
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, PlainValidator, model_validator

from gateway.settings.values.fields import File, Section
from gateway.settings.values.patterns import parse_header_name

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_HERE = "keys are not written here: name the file, or the environment variable, that holds them"
_AS_IF_HERE = ("key", "keys", "token", "tokens", "value", "values", "secret", "bearer")

# What frames a message, or is of this hop alone, cannot hold a key.
_TAKEN = (
    *("connection", "content-encoding", "content-length", "content-type", "expect", "host"),
    *("inference-header-content-length", "keep-alive", "te", "trailer", "transfer-encoding"),
    "upgrade",
)


def _variable(value: object) -> str:
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        # What stands there may be the keys.
        raise ValueError("expected the name of an environment variable")
    return value


def _header(value: object) -> str:
    name = parse_header_name(value)
    if name.lower() == "authorization":
        raise ValueError("without header, keys are shown as Authorization: Bearer KEY already")
    if name.lower() in _TAKEN:
        raise ValueError(f"{name} has a use of its own and cannot hold a key")
    return name


class ApiKeys(Section):
    """Say where the keys of a group are, in a file or a variable, and how clients show them."""

    file: File | None = Field(
        default=None, description="The file that holds them, one on each line."
    )
    environment: Annotated[str, PlainValidator(_variable, json_schema_input_type=str)] | None = (
        Field(
            default=None,
            description="The environment variable that holds them, with commas or spaces between.",
        )
    )
    header: Annotated[str, PlainValidator(_header, json_schema_input_type=str)] | None = Field(
        default=None,
        description="The header that holds a client's key and nothing else; without it, keys are"
        " shown as Authorization: Bearer KEY.",
    )

    @model_validator(mode="before")
    @classmethod
    def _hold_no_key(cls, value: object) -> object:
        """Refuse what may be a key, without repeating it."""
        named = value if isinstance(value, Mapping) else {}
        if isinstance(value, str | list | tuple) or any(name in named for name in _AS_IF_HERE):
            raise ValueError(_NOT_HERE)
        return value

    @model_validator(mode="after")
    def _have_one_place(self) -> Self:
        if (self.file is None) == (self.environment is None):
            raise ValueError("expected either file or environment, which holds the keys")
        return self
