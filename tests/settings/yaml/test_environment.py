import pytest

from gateway.settings.yaml.environment import expand

ENVIRON = {"HOST": "triton", "PORT": "8000", "EMPTY": "", "TRICK": "${HOST}"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("", ""),
        ("$HOST costs $5", "$HOST costs $5"),
        ("${HOST}", "triton"),
        ("http://${HOST}:${PORT}", "http://triton:8000"),
        ("${HOST:-other}", "triton"),
        ("${NONE:-other}", "other"),
        ("${NONE:-http://a:1/}", "http://a:1/"),
        ("${NONE:-:-}", ":-"),
        ("${NONE:-}", ""),
        ("${EMPTY}", ""),
        ("${EMPTY:-other}", "other"),
        ("$${HOST}", "${HOST}"),
        ("$$${HOST}", "$${HOST}"),
        ("$${HOST} ${HOST}", "${HOST} triton"),
        ("${TRICK}", "${HOST}"),
    ],
)
def test_references_give_way_to_the_environment(text: str, expanded: str) -> None:
    assert expand(text, ENVIRON) == expanded


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${NONE}", "NONE is not set in the environment, and no default is given"),
        ("${NONE}${NONE}", "NONE is not set in the environment, and no default is given"),
        ("${A}:${HOST}:${B}", "A, B are not set in the environment, and no default is given"),
        ("${", "a ${ without its }; write $${ for the characters themselves"),
        ("${HOST", "a ${ without its }; write $${ for the characters themselves"),
        ("${}", "expected ${NAME} or ${NAME:-default}, got '${}'"),
        ("${1X}", "expected ${NAME} or ${NAME:-default}, got '${1X}'"),
        ("${A-b}", "expected ${NAME} or ${NAME:-default}, got '${A-b}'"),
        ("${ HOST }", "expected ${NAME} or ${NAME:-default}, got '${ HOST }'"),
        ("${A:-${HOST}}", "one ${...} cannot stand inside another"),
    ],
)
def test_faulty_references(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        expand(text, ENVIRON)
    assert str(error.value) == message
