"""Bodies in few words: their form and sizes, and a line for each tensor."""

import json
from typing import Any, Final

from gateway.demo.server.recorder import Message

_SHOWN_ELEMENTS: Final = 3


def describe(message: Message) -> str:
    """Tell the form and sizes of a body."""
    if message.form == "empty":
        return "no body"
    text = f"{message.form}, {message.size:,} bytes"
    if not message.header_length:
        return text
    tensors = message.size - message.header_length
    return f"{text}: a header of {message.header_length:,} and tensors of {tensors:,}"


def digest(json_text: str) -> list[str]:
    """Return a line for each tensor of a request or response, or else the JSON text itself."""
    try:
        document = json.loads(json_text)
    except ValueError:  # empty, or cut off
        return [json_text] if json_text else []
    try:
        return [_tensor(entry) for entry in document.get("inputs") or document["outputs"]]
    except (KeyError, TypeError, AttributeError):  # about no tensors
        return [json.dumps(document)]


def _tensor(entry: dict[str, Any]) -> str:
    shape = ",".join(map(str, entry["shape"]))
    if "data" in entry:
        content = f"data {_elements(entry['data'])}"
    else:
        content = f"binary_data_size {entry['parameters']['binary_data_size']:,}"
    return f"{entry['name']}  {entry['datatype']} [{shape}]  {content}"


def _elements(data: list[Any]) -> str:
    shown = [f"{e:.6g}" if isinstance(e, float) else str(e) for e in data[:_SHOWN_ELEMENTS]]
    if len(data) > len(shown):
        shown.append(f"… {len(data):,} in all")
    return f"[{', '.join(shown)}]"
