"""Requests and answers: what is done with both alike, and said in the words of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import Datatype


class Tensor(Protocol):
    """A tensor as its message declares it."""

    @property
    def name(self) -> str:
        """Give its name."""

    @property
    def datatype(self) -> Datatype:
        """Give its datatype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Give its shape."""

    @property
    def binary_size(self) -> int | None:
        """Give its bytes behind the header; None unless it travels in binary form."""


@dataclass(frozen=True, slots=True)
class ErrorVocabulary:
    """A request or an answer, as errors speak of it.

    ``tensors`` is the key of its tensors, ``tensor`` what one of them is called.
    """

    name: str
    tensors: str
    tensor: str
    broken: ErrorKind
    """What it is if it breaks the protocol: who wrote it is at fault."""
    too_large: ErrorKind
    """What it is if it exceeds a cap."""
    policy_violation: ErrorKind
    """What it is if it holds a value that a policy keeps out of JSON."""
    instead_of_number: str
    """What else can be done then, beside another policy."""
    instead_of_text: str
    """What else can be done where it holds text that is none, beside another policy."""
    null_is_nan: bool
    """Whether null stands for NaN: servers that know JSON only write it so."""
    tensor_limit: str = ""
    """How errors name the setting that caps its tensors, if there is one."""
    of_it: str = ""
    """What follows the name of a part, where it would not be clear whose it is."""

    def malformed(self, what: str) -> GatewayError:
        """Make the error of one that breaks the protocol; ``what`` names the culprit."""
        return GatewayError(self.broken, what)

    def too_many_tensors(self, cap: int) -> GatewayError:
        """Make the error of one with more tensors than the cap."""
        return self.malformed(f"{self.name} has more than {cap} {self.tensors}{self.tensor_limit}")

    def label(self, name: str) -> str:
        """Name a tensor, as errors do."""
        return f"{self.tensor} '{name}'"

    def label_of(self, fields: Mapping[str, object], index: int) -> str:
        """Name a tensor by what is there of its fields: by its place where there is no name."""
        name = fields.get("name")
        return self.label(name) if isinstance(name, str) else f"{self.tensors}[{index}]"


REQUEST = ErrorVocabulary(
    name="the request",
    tensors="inputs",
    tensor="input",
    broken=ErrorKind.BAD_REQUEST,
    too_large=ErrorKind.TOO_LARGE,
    policy_violation=ErrorKind.BAD_REQUEST,
    instead_of_number="",
    instead_of_text="",
    null_is_nan=False,
    tensor_limit=" (limits.max_tensors)",
)
RESPONSE = ErrorVocabulary(
    name="the server's answer",
    tensors="outputs",
    tensor="output",
    broken=ErrorKind.BAD_RESPONSE,
    too_large=ErrorKind.BAD_RESPONSE,
    policy_violation=ErrorKind.NOT_ACCEPTABLE,
    instead_of_number="ask for this output in binary form, or ",
    instead_of_text="ask for this output in binary form or with content_type base64, or ",
    null_is_nan=True,
    of_it=" of the server's answer",
)
