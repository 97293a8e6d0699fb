import pytest

from tests.support.doubles.streaming import ScriptedUpstreamResponse


@pytest.mark.parametrize(
    ("said", "length"),
    [("0", 0), ("17", 17), (None, None), ("", None), ("-1", None), ("x", None), ("²", None)],
)
def test_content_length_is_read_from_its_header(said: str | None, length: int | None) -> None:
    headers = {} if said is None else {"content-length": said}
    assert ScriptedUpstreamResponse(headers=headers).content_length == length
