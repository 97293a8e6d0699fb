"""Settings of API keys: where the keys of a group are, never the keys themselves."""

import re
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import model_validator

from gateway.settings.values.fields import Check, File, Section
from gateway.settings.values.patterns import parse_header_name

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NO_KEYS_HERE = (
    "keys are not written here: name the file, or the environment variable, that holds them"
)
_NAMES_OF_KEYS = ("key", "keys", "token", "tokens", "value", "values", "secret", "bearer")

# These frame a message or are of this hop alone (RFC 9110, section 7.6.1).
_RESERVED_HEADERS = (
    *("connection", "content-encoding", "content-length", "content-type", "expect", "host"),
    *("inference-header-content-length", "keep-alive", "te", "trailer", "transfer-encoding"),
    "upgrade",
)


def _variable_name(value: object) -> str:
    if not isinstance(value, str) or not _VARIABLE_NAME.fullmatch(value):
        # The value is not quoted: it may be a key.
        raise ValueError("expected the name of an environment variable")
    return value


def _key_header(value: object) -> str:
    name = parse_header_name(value)
    if name.lower() == "authorization":
        raise ValueError("without header, keys are shown as Authorization: Bearer KEY already")
    if name.lower() in _RESERVED_HEADERS:
        raise ValueError(f"{name} is a reserved header and cannot hold a key")
    return name


class ApiKeys(Section):
    """A group of API keys: the file or variable that holds them, and how clients show them."""

    file: File | None = None
    """File that holds the keys, one on each line."""
    environment: Annotated[str, Check(_variable_name, str)] | None = None
    """Environment variable that holds the keys, with commas or spaces between."""
    header: Annotated[str, Check(_key_header, str)] | None = None
    """Request header that holds a client's key and nothing else. Without it, clients send
    Authorization: Bearer KEY."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_keys(cls, value: object) -> object:
        """Refuse what may be a key, without quoting it."""
        named = value if isinstance(value, Mapping) else {}
        if isinstance(value, str | list | tuple) or any(name in named for name in _NAMES_OF_KEYS):
            raise ValueError(_NO_KEYS_HERE)
        return value

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.file is None) == (self.environment is None):
            raise ValueError("expected either file or environment, which holds the keys")
        return self
