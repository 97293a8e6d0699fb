"""A JSON answer, of which the client wants some outputs, or all of them, in binary form."""

from __future__ import annotations

from gateway.codec.array_scanner import Run, StringPart
from gateway.codec.elements_from_json import TensorFromJson
from gateway.codec.json_tensors import Elements, JsonTensors
from gateway.codec.json_writer import skeleton
from gateway.errors import bad_answer
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.inference_header import (
    DEEPEST_ANSWER,
    AnswerForm,
    Fields,
    OutputTensor,
    parse_answer,
    read_outputs,
    says_base64,
)
from gateway.protocol.messages import ANSWER


class BinaryAnswer(JsonTensors):
    """Converts a JSON answer as it arrives, and holds it in the client's form.

    The data of outputs that the client wants as JSON stay as the server wrote them. In others, null
    becomes NaN, and base64 what it encodes where the output's content type says that it is base64.
    ``header_cap`` and ``spool_cap`` are in bytes: of the JSON around the data, and of the data.
    """

    def __init__(self, form: AnswerForm, header_cap: int, spool_cap: int) -> None:
        super().__init__(ANSWER, header_cap, DEEPEST_ANSWER)
        self._form = form
        self._spool_cap = spool_cap

    def feed(self, text: bytes | memoryview, last: bool = False) -> None:
        """Convert the next text of the answer; ``last`` tells that it is the end.

        Raises GatewayError (502) that names what is wrong, or says that the cap is exceeded.
        """
        super().feed(text, last)
        if self.held > self._spool_cap:
            raise bad_answer(
                f"an answer that becomes binary is held, and is larger than {self._spool_cap} "
                "bytes (limits.spool_bytes); ask for all outputs as JSON"
            )

    def finish(self) -> tuple[bytes, list[bytes]]:
        """Give the header and the binary tensors behind it, once all text was fed.

        Raises GatewayError (502) that names the output for whatever the server got wrong.
        """
        header = self._finished()
        entries = header.fields.get("outputs", [])
        kept: dict[int, bytes] = {}
        tensors: list[bytes] = []
        for array in self._arrays:
            index = array.index
            if isinstance(array.elements, _KeptText):
                kept[index] = array.elements.text
            else:
                tensor = self._converted(array, header.tensors[index])
                entries[index] = _in_binary(entries[index], tensor.size)
                tensors += tensor.chunks
        is_kept = [index in kept for index in range(len(entries))]
        parts = skeleton(header.fields, ANSWER.tensors, is_kept)
        text = [parts[0]]
        for data, behind in zip(kept.values(), parts[1:], strict=True):
            text += data, behind
        return b"".join(text), tensors

    def _elements(self, label: str, fields: Fields) -> Elements | None:
        if "name" not in fields:
            return None
        if not self._form.wants_binary(str(fields["name"])):
            return _KeptText()
        datatype = fields.get("datatype")
        if isinstance(datatype, str) and datatype in DATATYPES:
            return TensorFromJson(label, DATATYPES[datatype], ANSWER)
        return None

    def _parse(self, text: bytes) -> tuple[Fields, tuple[OutputTensor, ...]]:
        fields = parse_answer(text)
        return fields, read_outputs(fields)


class _KeptText:
    """The text between the brackets of an array, as it is."""

    def __init__(self) -> None:
        self.size = 0
        self._chunks: list[bytes] = []
        self._string: list[bytes] = []

    @property
    def text(self) -> bytes:
        """Give the text of an array that is there as a whole."""
        return b"".join(self._chunks)[1:-1]

    def feed(self, item: Run | StringPart) -> None:
        """Take the next run, or piece of a long string."""
        if isinstance(item, StringPart):
            self._string.append(item.text)
            self.size += len(item.text)
            return
        text = item.text
        if self._string:
            # The empty string that stands for it comes first.
            before, _, behind = text.partition(b'""')
            text = b"".join((before, b'"', *self._string, b'"', behind))
            self._string = []
        self._chunks += [text] if item.first else [b",", text]
        self.size += len(text)


def _in_binary(entry: Fields, size: int) -> Fields:
    """Give an output's fields for data that follows the header as ``size`` bytes."""
    parameters = dict(entry.get("parameters") or {})
    if says_base64(entry) and entry["datatype"] == "BYTES":
        del parameters["content_type"]  # it was that of the data
    plain = {key: value for key, value in entry.items() if key != "data"}
    return {**plain, "parameters": {**parameters, "binary_data_size": size}}
