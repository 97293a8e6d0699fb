DATATYPES: tuple[str, ...]

def decode_numbers(
    text: bytes | memoryview, datatype: int, open_before: int = 0, open_after: int = 0, /
) -> bytes | None: ...
