"""The words and kinds of errors for requests and for responses, whose checks are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import ErrorKind, GatewayError, ModelMismatchError
from gateway.protocol.datatypes import Datatype


class Tensor(Protocol):
    """A tensor as a message declares it."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def datatype(self) -> Datatype:
        """Return its datatype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""

    @property
    def binary_size(self) -> int | None:
        """Return its bytes after the header; None unless it is binary."""


@dataclass(frozen=True, slots=True)
class ErrorVocabulary:
    """How errors describe a message: a request or a response.

    ``tensors`` is the JSON key of its tensors, ``tensor`` the word for one of them.
    """

    name: str
    tensors: str
    tensor: str
    malformed_kind: ErrorKind
    """The kind of a message that violates the protocol; its author is at fault."""
    too_large: ErrorKind
    """The kind of a message that exceeds a limit."""
    policy_violation: ErrorKind
    """The kind of a message with a value that a policy refuses in JSON."""
    instead_of_number: str = ""
    """Advice for such a number, before the advice to set another policy."""
    instead_of_text: str = ""
    """Advice for bytes that are no text, before the advice to set another policy."""
    null_is_nan: bool = False
    """Whether null means NaN, as servers without binary tensors write it."""
    null_is_absent: bool = False
    """Whether parameters that are null are absent, as KServe writes it."""
    tensor_limit: str = ""
    """The setting that limits the number of tensors, as a suffix; empty without one."""
    part_suffix: str = ""
    """Follows the name of a part of the message if it would be unclear whose part it is."""

    def malformed(self, what: str) -> GatewayError:
        """Make the error of a malformed message; ``what`` names the invalid element."""
        return GatewayError(self.malformed_kind, what)

    def wrong_datatype(self, what: str) -> GatewayError:
        """Make the error of a JSON value that its tensor's datatype does not take."""
        is_request = self.malformed_kind is ErrorKind.BAD_REQUEST
        return ModelMismatchError(what) if is_request else self.malformed(what)

    def invalid_protobuf(self, reason: object) -> GatewayError:
        """Make the error of bytes that are not valid protobuf."""
        return self.malformed(f"{self.name} is not valid protobuf: {reason}")

    def too_many_tensors(self, cap: int) -> GatewayError:
        """Make the error of a message with more tensors than ``cap``."""
        return self.malformed(f"{self.name} has more than {cap} {self.tensors}{self.tensor_limit}")

    def label(self, name: str) -> str:
        """Return how errors name a tensor."""
        return f"{self.tensor} '{name}'"

    def label_of(self, fields: Mapping[str, object], index: int) -> str:
        """Return how errors name a tensor of incomplete fields: by its index if it has no name."""
        name = fields.get("name")
        return self.label(name) if isinstance(name, str) else f"{self.tensors}[{index}]"


REQUEST = ErrorVocabulary(
    name="the request",
    tensors="inputs",
    tensor="input",
    malformed_kind=ErrorKind.BAD_REQUEST,
    too_large=ErrorKind.TOO_LARGE,
    policy_violation=ErrorKind.BAD_REQUEST,
    tensor_limit=" (limits.max_tensors)",
)
RESPONSE = ErrorVocabulary(
    name="the server's response",
    tensors="outputs",
    tensor="output",
    malformed_kind=ErrorKind.BAD_RESPONSE,
    too_large=ErrorKind.BAD_RESPONSE,
    policy_violation=ErrorKind.NOT_ACCEPTABLE,
    instead_of_number="ask for this output in binary form, or ",
    instead_of_text="ask for this output in binary form or with content_type base64, or ",
    null_is_nan=True,
    null_is_absent=True,
    part_suffix=" of the server's response",
)
