import pytest

from gateway.errors import ErrorKind
from gateway.protocol.error_vocabulary import ANSWER, REQUEST, Message


@pytest.mark.parametrize(
    ("message", "label", "kind"),
    [(REQUEST, "input 'x'", ErrorKind.BAD_REQUEST), (ANSWER, "output 'x'", ErrorKind.BAD_ANSWER)],
)
def test_who_wrote_it_is_at_fault(message: Message, label: str, kind: ErrorKind) -> None:
    assert message.label("x") == label
    fault = message.fault("all wrong")
    assert (fault.kind, fault.message) == (kind, "all wrong")
