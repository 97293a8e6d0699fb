"""Finding parts of JSON text without parsing it."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json.text_search import contains, has_data_key, split_id


@given(st.binary(max_size=20), st.binary(max_size=3))
def test_contains_agrees_with_the_operator(text: bytes, part: bytes) -> None:
    assert contains(text, part) == (part in text)


@given(st.text("ab 7-/~", max_size=8))
def test_plain_id_is_taken_out(value: str) -> None:
    text = b'{"id": %b, "inputs": []}' % orjson.dumps(value)
    assert split_id(text) == (b'{"id": "", "inputs": []}', value)


@given(st.sampled_from(("data", "id", "x")), st.sampled_from(("data", "id", "x")))
def test_keys_are_told_from_strings(key: str, value: str) -> None:
    for text in (orjson.dumps({key: value}), b'{"%b" \n: "%b"}' % (key.encode(), value.encode())):
        assert has_data_key(text) == (key == "data")
        assert (split_id(text)[1] is not None) == (key == "id")
    assert split_id(b'{"name":"id","id":"id"}') == (b'{"name":"id","id":""}', "id")


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[]}',
        b'{"name":"id"}',
        b'{"id":7}',
        b'{"id":"a\\n"}',
        '{"id":"é"}'.encode(),
        b'{"id":"a","x":{"id":"b"}}',
        b'{"id":"a',
    ],
)
def test_other_ids_stay_in_the_text(text: bytes) -> None:
    assert split_id(text) == (text, None)
