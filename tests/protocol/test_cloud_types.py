import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.cloud_types import SAGEMAKER, VERTEX_AI, is_cloud_type, parse_cloud_type
from tests.support.checks.refused import refused

SAGEMAKER_TYPE = "application/vnd.sagemaker-triton.binary+json"
VERTEX_AI_TYPE = "application/vnd.vertex-ai-triton.binary+json"
CLOUDS = [(SAGEMAKER_TYPE, SAGEMAKER), (VERTEX_AI_TYPE, VERTEX_AI)]


@pytest.mark.parametrize(
    ("parameters", "size"),
    [
        # As Triton's documentation and clients write it.
        (";json-header-size=123", 123),
        (" \t;\t json-header-size=123 \t", 123),
        (";JSON-Header-Size=123", 123),
        (';json-header-size="123"', 123),
        (';json-header-size=123; x="a;json-header-size=4\\";b"', 123),
        ("", None),
        (";x-json-header-size=1", None),
    ],
)
def test_header_size_is_parsed(parameters: str, size: int | None) -> None:
    for content_type, cloud in CLOUDS:
        for written in (content_type, content_type.upper(), " " + content_type):
            assert is_cloud_type(written + parameters)
            found = parse_cloud_type(written + parameters)
            assert found is not None
            assert (found.cloud, found.header_size) == (cloud, size)


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/vnd.other-triton.binary+json;json-header-size=7"],
)
def test_other_content_types_are_ignored(content_type: str) -> None:
    assert not is_cloud_type(content_type)
    assert parse_cloud_type(content_type) is None


NO_NUMBER = "json-header-size of the Content-Type must be a number of bytes, got "
UNREADABLE = "the Content-Type has a parameter that cannot be read, near "


@pytest.mark.parametrize(
    ("content_type", "message"),
    [
        (";json-header-size=-123", NO_NUMBER + "'-123'"),
        (";json-header-size=" + "9" * 9999, NO_NUMBER + f"'{'9' * 60}'"),
        (
            ";json-header-size=1;json-header-size=1",
            "the Content-Type has more than one json-header-size",
        ),
        (";json-header-size=", UNREADABLE + "'json-header-size='"),
        (';json-header-size="1', UNREADABLE + "'json-header-size=\"1'"),
        (",application/json", UNREADABLE + "',application/json'"),
    ],
)
def test_invalid_size_is_refused(content_type: str, message: str) -> None:
    for start, _ in CLOUDS:
        with refused(ErrorKind.BAD_REQUEST, message):
            parse_cloud_type(start + content_type)


@pytest.mark.parametrize("start", ["additional-string/", "x", "application/json, ", '"'])
def test_type_with_a_prefix_is_refused(start: str) -> None:
    # Triton refuses it, too.
    for content_type, _ in CLOUDS:
        with pytest.raises(GatewayError, match=r"^the Content-Type must begin with") as caught:
            parse_cloud_type(f"{start}{content_type};json-header-size=1")
        assert content_type in caught.value.message


@pytest.mark.parametrize("unit", [";", "; ", " ", ";a=b", ';a="', ";a=", '\\"'])
def test_long_type_is_parsed_in_linear_time(unit: str) -> None:
    # A pattern that backtracks would not end.
    with pytest.raises(GatewayError) as caught:
        parse_cloud_type(SAGEMAKER_TYPE + unit * 20_000 + ";json-header-size=x")
    assert len(caught.value.message) < 300
