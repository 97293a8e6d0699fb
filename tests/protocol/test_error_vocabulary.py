import pytest

from gateway.errors import ErrorKind
from gateway.protocol.error_vocabulary import REQUEST, RESPONSE, ErrorVocabulary


@pytest.mark.parametrize(
    ("message", "label", "kind"),
    [
        (REQUEST, "input 'x'", ErrorKind.BAD_REQUEST),
        (RESPONSE, "output 'x'", ErrorKind.BAD_RESPONSE),
    ],
)
def test_who_wrote_it_is_at_fault(message: ErrorVocabulary, label: str, kind: ErrorKind) -> None:
    assert message.label("x") == label
    fault = message.malformed("all wrong")
    assert (fault.kind, fault.message) == (kind, "all wrong")
