"""The examples of RFC 7541, appendix C."""

from __future__ import annotations

from gateway.http2.hpack import Header

Fields = tuple[Header, ...]
Example = tuple[int, list[tuple[str, Fields, Fields]]]
"""The table size, and for each block: its bytes, its fields, and the table afterwards."""


def fields(text: str) -> Fields:
    """Return the fields of lines like ``:method: GET``."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return tuple((name.encode(), value.encode()) for name, _, value in pairs)


_FIRST = fields(":method: GET\n:scheme: http\n:path: /\n:authority: www.example.com")
_NO_CACHE, _CUSTOM = fields("cache-control: no-cache\ncustom-key: custom-value")
_THIRD = fields(":method: GET\n:scheme: https\n:path: /index.html\n:authority: www.example.com")
_REQUESTS = [_FIRST, (*_FIRST, _NO_CACHE), (*_THIRD, _CUSTOM)]
_REQUEST_TABLES = [_FIRST[3:], (_NO_CACHE, _FIRST[3]), (_CUSTOM, _NO_CACHE, _FIRST[3])]
_FOUND = fields(
    ":status: 302\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:21 GMT\n"
    "location: https://www.example.com"
)
(_307,) = fields(":status: 307")
_OK = fields(
    ":status: 200\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:22 GMT\n"
    "location: https://www.example.com\ncontent-encoding: gzip\n"
    "set-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"
)
_RESPONSES = [_FOUND, (_307, *_FOUND[1:]), _OK]
_RESPONSE_TABLES = [_FOUND[::-1], (_307, *_FOUND[:0:-1]), (_OK[5], _OK[4], _OK[2])]


def _example(size: int, blocks: list[str], lists: list[Fields], tables: list[Fields]) -> Example:
    return size, list(zip(blocks, lists, tables, strict=True))


C_3 = _example(
    4096,
    [
        "828684410f7777772e6578616d706c652e636f6d",
        "828684be58086e6f2d6361636865",
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
    ],
    _REQUESTS,
    _REQUEST_TABLES,
)
C_4 = _example(
    4096,
    [
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        "828684be5886a8eb10649cbf",
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
    ],
    _REQUESTS,
    _REQUEST_TABLES,
)
C_5 = _example(
    256,
    [
        "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d54"
        "6e1768747470733a2f2f7777772e6578616d706c652e636f6d",
        "4803333037c1c0bf",
        "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f"
        "3d4153444a4b48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076"
        "657273696f6e3d31",
    ],
    _RESPONSES,
    _RESPONSE_TABLES,
)
C_6 = _example(
    256,
    [
        "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f"
        "0b97c8e9ae82ae43d3",
        "4883640effc1c0bf",
        "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335df"
        "dfcd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
    ],
    _RESPONSES,
    _RESPONSE_TABLES,
)
EXAMPLES = {"C_3": C_3, "C_4": C_4, "C_5": C_5, "C_6": C_6}
SIZE_256 = bytes.fromhex("3fe101")
"""The change of the table size that comes before C.5 and C.6."""
