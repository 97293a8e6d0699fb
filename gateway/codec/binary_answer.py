"""A JSON answer, of which the client wants some outputs, or all of them, in binary form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import simdjson

from gateway.codec.array_scanner import Run, StringPart
from gateway.codec.elements_from_json import TensorFromJson
from gateway.codec.json_tensors import Elements, JsonTensors
from gateway.codec.json_writer import skeleton
from gateway.errors import bad_answer
from gateway.protocol.answer_header import DEEPEST_ANSWER, OutputTensor, parse_answer, read_outputs
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.inference_header import AnswerForm, Fields, says_base64
from gateway.protocol.messages import ANSWER

Chunks = list[bytes | memoryview]

# What simdjson raises for text that it does not take.
_REFUSALS = (ValueError, TypeError, RuntimeError)


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """An answer taken apart: its fields, its outputs, and what they hold, in the client's form.

    By the index of an output: ``texts`` between the brackets of those that are JSON, the bytes in
    ``tensors`` of those in binary form. What has neither is somewhere else.
    """

    fields: Fields
    outputs: Sequence[OutputTensor]
    texts: dict[int, Chunks]
    tensors: dict[int, Chunks]

    def joined(self) -> tuple[bytes, Chunks]:
        """Give the header and the binary tensors behind it."""
        entries = self.fields.get("outputs", [])
        tensors: Chunks = []
        for index, chunks in sorted(self.tensors.items()):
            entries[index] = _in_binary(entries[index], sum(map(len, chunks)))
            tensors += chunks
        is_text = [index in self.texts for index in range(len(entries))]
        parts = skeleton(self.fields, ANSWER.tensors, is_text)
        header: Chunks = [parts[0]]
        for index, behind in zip(sorted(self.texts), parts[1:], strict=True):
            header += [*self.texts[index], behind]
        return b"".join(header), tensors


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
        self._outputs: tuple[OutputTensor, ...] = ()

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

    def finish(self) -> tuple[bytes, Chunks]:
        """Give the header and the binary tensors behind it, once all text was fed.

        Raises GatewayError (502) that names the output for whatever the server got wrong.
        """
        parts = self.parts()
        for index, output in enumerate(parts.outputs):
            if index in parts.texts or index in parts.tensors or output.binary_size is None:
                continue
            if output.binary_size:
                raise bad_answer(
                    f"output '{output.name}' of the server's answer has {output.binary_size} "
                    "bytes, which do not follow its JSON"
                )
            where = parts.tensors if self._form.wants_binary(output.name) else parts.texts
            where[index] = []
        return parts.joined()

    def parts(self) -> AnswerParts:
        """Give what the JSON holds; raises GatewayError as ``finish`` does."""
        header = self._finished()
        texts: dict[int, Chunks] = {}
        tensors: dict[int, Chunks] = {}
        for array in self._arrays:
            index = array.index
            if isinstance(array.elements, _KeptText):
                texts[index] = [array.elements.text]
            else:
                tensors[index] = [*self._converted(array, header.tensors[index]).chunks]
        return AnswerParts(header.fields, self._outputs, texts, tensors)

    def _elements(self, label: str, fields: Fields) -> Elements | None:
        if "name" not in fields:
            return None
        if not self._form.wants_binary(str(fields["name"])):
            return _KeptText(label)
        datatype = fields.get("datatype")
        if isinstance(datatype, str) and datatype in DATATYPES:
            return TensorFromJson(label, DATATYPES[datatype], ANSWER)
        return None

    def _parse(self, text: bytes) -> tuple[Fields, tuple[OutputTensor, ...]]:
        fields = parse_answer(text)
        self._outputs = read_outputs(fields)
        return fields, self._outputs


class _KeptText:
    """The text between the brackets of an array, as it is; ``label`` names its output."""

    def __init__(self, label: str) -> None:
        self.size = 0
        self._label = label
        self._parser = simdjson.Parser()
        self._chunks: list[bytes] = []
        self._string: list[bytes] = []

    @property
    def text(self) -> bytes:
        """Give the text of an array that is there as a whole."""
        return b"".join(self._chunks)[1:-1]

    def feed(self, item: Run | StringPart) -> None:
        """Take the next run, or piece of a long string; raises GatewayError (502) if broken."""
        if isinstance(item, StringPart):
            self._string.append(item.text)
            self.size += len(item.text)
            return
        self._check(item)
        text = item.text
        if self._string:
            # The empty string that stands for it comes first.
            before, _, behind = text.partition(b'""')
            text = b"".join((before, b'"', *self._string, b'"', behind))
            self._string = []
        self._chunks += [text] if item.first else [b",", text]
        self.size += len(text)

    def _check(self, run: Run) -> None:
        """Check that it is JSON, or would be if that had words for NaN and the infinities."""
        if not run.lacks_element:
            text = run.balanced()
            with suppress(*_REFUSALS):
                self._parser.parse(text)
                return
            with suppress(ValueError):
                json.loads(text, parse_int=str, parse_float=str)
                return
        raise bad_answer(f"{self._label} of the server's answer has data that are no JSON array")


def _in_binary(entry: Fields, size: int) -> Fields:
    """Give an output's fields for data that follows the header as ``size`` bytes."""
    parameters = dict(entry.get("parameters") or {})
    if "data" in entry and says_base64(entry) and entry["datatype"] == "BYTES":
        del parameters["content_type"]  # it was that of the data
    plain = {key: value for key, value in entry.items() if key != "data"}
    return {**plain, "parameters": {**parameters, "binary_data_size": size}}
