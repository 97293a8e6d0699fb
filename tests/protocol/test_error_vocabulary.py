import pytest

from gateway.errors import ErrorKind
from gateway.protocol.error_vocabulary import REQUEST, RESPONSE, ErrorVocabulary


@pytest.mark.parametrize(
    ("words", "label", "kind"),
    [
        (REQUEST, "input 'x'", ErrorKind.BAD_REQUEST),
        (RESPONSE, "output 'x'", ErrorKind.BAD_RESPONSE),
    ],
)
def test_malformed_message_is_its_authors_error(
    words: ErrorVocabulary, label: str, kind: ErrorKind
) -> None:
    assert words.label("x") == label
    fault = words.malformed("all wrong")
    assert (fault.kind, fault.message) == (kind, "all wrong")
