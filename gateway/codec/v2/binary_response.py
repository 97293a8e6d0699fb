"""Converts JSON responses for clients that want some outputs in binary form or as base64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gateway.codec.elements.base64_elements import encode_base64
from gateway.codec.elements.decode import TensorDecoder, parse_strings
from gateway.codec.elements.encode import make_tensor_encoder
from gateway.codec.elements.fast_decode import PARSE_ERRORS, simd_parse
from gateway.codec.json.array_scanner import ElementRun, StringPart
from gateway.codec.json.data_extractor import Event
from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.codec.v2.json_reader import ElementSink, JsonMessageReader
from gateway.codec.v2.json_writer import split_around_data
from gateway.errors import bad_response
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.json_errors import ExtractedArray
from gateway.protocol.messages import Fields, OutputEncoding
from gateway.protocol.request_header import has_base64_content, mark_base64
from gateway.protocol.response_header import (
    MAX_OUTPUTS,
    MAX_RESPONSE_DEPTH,
    OutputTensor,
    parse_response_header,
    read_outputs,
)

Chunks = list[bytes | memoryview]

_DEFAULT_POLICIES = JsonPolicies()
_BASE64_POLICIES = JsonPolicies(bytes_encoding=BytesEncoding.BASE64)


@dataclass(frozen=True, slots=True)
class ResponseParts:
    """A response taken apart, with its data in the client's encoding.

    By the index of an output: ``texts`` are the text between the brackets of JSON outputs,
    ``tensors`` the bytes of binary ones. An output in neither has its data elsewhere.
    """

    fields: Fields
    outputs: Sequence[OutputTensor]
    texts: dict[int, Chunks]
    tensors: dict[int, Chunks]

    def joined(self) -> tuple[bytes, Chunks]:
        """Return the header and the binary tensors behind it."""
        entries = self.fields.get("outputs", [])
        tensors: Chunks = []
        for index, chunks in sorted(self.tensors.items()):
            entries[index] = _as_binary_output(entries[index], sum(map(len, chunks)))
            tensors += chunks
        is_text = [index in self.texts for index in range(len(entries))]
        parts = split_around_data(self.fields, RESPONSE.tensors, is_text)
        header: Chunks = [parts[0]]
        for index, after in zip(sorted(self.texts), parts[1:], strict=True):
            header += [*self.texts[index], after]
        return b"".join(header), tensors


class BinaryResponseConverter(JsonMessageReader):
    """Converts a JSON response while it arrives, and buffers it in the client's encoding.

    Outputs requested as JSON keep the server's text. Only BYTES that are requested as base64 are
    encoded and marked, unless they are base64 already.

    In outputs requested in binary form, null becomes NaN. BYTES are decoded from base64 if their
    content type says so.

    ``header_cap`` limits the JSON around the data, ``body_cap`` the data, both in bytes.
    """

    def __init__(
        self,
        form: OutputEncoding,
        header_cap: int,
        body_cap: int,
        policies: JsonPolicies = _DEFAULT_POLICIES,
    ) -> None:
        super().__init__(RESPONSE, header_cap, MAX_RESPONSE_DEPTH, tensor_cap=MAX_OUTPUTS)
        self._form = form
        self._policies = policies
        self._body_cap = body_cap
        self._outputs: tuple[OutputTensor, ...] = ()

    def feed(self, text: bytes | memoryview, last: bool = False) -> None:
        """Convert the next text of the response; ``last`` marks the end.

        Raises GatewayError (502) that names what is invalid, or that the cap is exceeded.
        """
        super().feed(text, last)
        self._check_spool()

    def step(self) -> bool:
        """Do one step; see JsonMessageReader."""
        more = super().step()
        self._check_spool()
        return more

    def _handle_event(self, event: Event) -> None:
        super()._handle_event(event)
        self._convert_some()  # the cap counts data in the client's encoding

    def _check_spool(self) -> None:
        if self.buffered_data_bytes > self._body_cap:
            encoding, advice = "binary", "ask for all outputs as JSON"
            if self._form.all_json:
                encoding, advice = "base64", "ask for all outputs in binary form"
            raise bad_response(
                f"a response that becomes {encoding} must be buffered, and exceeds "
                f"{self._body_cap} bytes (limits.max_buffered_body_bytes); {advice}"
            )

    def finish(self) -> tuple[bytes, Chunks]:
        """Return the header and the binary tensors behind it, once all text was fed.

        Raises GatewayError (502) that names the output for anything invalid.
        """
        parts = self.take_parts()
        for index, output in enumerate(parts.outputs):
            if index in parts.texts or index in parts.tensors or output.binary_size is None:
                continue
            if output.binary_size:
                raise bad_response(
                    f"output '{output.name}' of the server's response has {output.binary_size} "
                    "bytes, which do not follow its JSON"
                )
            target = parts.tensors if self._form.wants_binary(output.name) else parts.texts
            target[index] = []
        return parts.joined()

    def take_parts(self) -> ResponseParts:
        """Return and release the content; raises GatewayError as ``finish`` does."""
        header = self._finish_header()
        texts: dict[int, Chunks] = {}
        tensors: dict[int, Chunks] = {}
        for array in self._arrays:
            index = array.index
            if isinstance(array.sink, _VerbatimText | _Base64Text):
                texts[index] = [array.sink.text]
                if isinstance(array.sink, _Base64Text):
                    mark_base64(header.fields["outputs"][index])
            else:
                tensors[index] = [*self._checked_tensor(array, header.tensors[index]).chunks]
            array.sink = None  # its data is in the parts now
        return ResponseParts(header.fields, self._outputs, texts, tensors)

    def _make_sink(self, label: str, fields: Fields) -> ElementSink | None:
        if "name" not in fields:
            return None
        if not self._form.wants_binary(str(fields["name"])):
            return self._make_text_sink(label, fields)
        datatype = fields.get("datatype")
        if isinstance(datatype, str) and datatype in DATATYPES:
            return TensorDecoder(label, DATATYPES[datatype], RESPONSE)
        return None

    def _make_text_sink(self, label: str, fields: Fields) -> ElementSink | None:
        if not self._policies.wants_base64(str(fields["name"])):
            return _VerbatimText(label)
        # The content type may follow the data; it is known once all fields are.
        is_complete = isinstance(fields.get("data"), list)  # the placeholder: all fields are known
        if not is_complete and not fields.keys() >= {"datatype", "parameters"}:
            return None
        return _Base64Text(label) if becomes_base64(fields) else _VerbatimText(label)

    def _parse_header(
        self, text: bytes, cuts: Sequence[ExtractedArray]
    ) -> tuple[Fields, tuple[OutputTensor, ...]]:
        fields = parse_response_header(text, cuts)
        self._outputs = read_outputs(fields)
        return fields, self._outputs


class _VerbatimText:
    """The text between the brackets of an array, as it came; ``label`` names its output."""

    def __init__(self, label: str) -> None:
        self.size = 0
        self._label = label
        self._chunks: list[bytes] = []
        self._string: list[bytes] = []

    @property
    def text(self) -> bytes:
        """Return the text of the complete array."""
        return b"".join(self._chunks)[1:-1]

    def feed(self, item: ElementRun | StringPart) -> None:
        """Take the next run or piece of a long string; raises GatewayError (502) if invalid."""
        if isinstance(item, StringPart):
            self._string.append(item.text)
            self.size += len(item.text)
            return
        self._check(item)
        text = item.text
        if self._string:
            # The first string is the placeholder of the long one.
            head, _, tail = text.partition(b'""')
            text = b"".join((head, b'"', *self._string, b'"', tail))
            self._string = []
        self._chunks += [text] if item.first else [b",", text]
        self.size += len(text)

    def _check(self, run: ElementRun) -> None:
        """Check that the run is JSON, apart from bare NaN and infinities."""
        if not run.lacks_element:
            text = run.balanced()
            with suppress(*PARSE_ERRORS):
                simd_parse(text)
                return
            with suppress(ValueError):
                json.loads(text, parse_int=str, parse_float=str)
                return
        raise bad_response(
            f"{self._label} of the server's response has data that are no JSON array"
        )


class _Base64Text:
    """The strings of an array, encoded as base64; ``label`` names its output."""

    def __init__(self, label: str) -> None:
        self.size = 0
        self._strings = TensorDecoder(label, DATATYPES["BYTES"], RESPONSE)
        self._writer = make_tensor_encoder(label, DATATYPES["BYTES"], _BASE64_POLICIES)
        self._chunks: list[bytes] = []

    @property
    def text(self) -> bytes:
        """Return the text between the brackets of the complete array."""
        return b"".join(self._chunks)

    def feed(self, item: ElementRun | StringPart) -> None:
        """Take the next run or piece of a long string; raises GatewayError (502) if invalid."""
        strings = self._strings
        before_size = strings.size
        if isinstance(item, ElementRun) and not strings.size:
            values = None if item.lacks_element else parse_strings(item)
            if values is not None:
                self._encode(values)
                return
        strings.feed(item)
        self.size += strings.size - before_size
        if isinstance(item, StringPart):
            return  # its length is not known yet
        texts = list(map(self._writer.feed, strings.chunks))
        self.size += sum(map(len, texts)) - strings.size
        strings.chunks, strings.size = [], 0
        self._chunks += texts

    def _encode(self, values: list[str]) -> None:
        """Encode many strings at once."""
        texts = b'","'.join(map(encode_base64, map(str.encode, values)))
        if values:
            self._chunks.append((b',"' if self._strings.count else b'"') + texts + b'"')
            self.size += len(self._chunks[-1])
        self._strings.count += len(values)
        self._writer.count += len(values)


def becomes_base64(entry: Fields) -> bool:
    """Tell whether an output's data must be encoded to become base64."""
    return entry.get("datatype") == "BYTES" and not has_base64_content(entry)


def _as_binary_output(entry: Fields, size: int) -> Fields:
    """Return an output's fields for ``size`` bytes of data behind the header."""
    parameters = dict(entry.get("parameters") or {})
    if "data" in entry and has_base64_content(entry) and entry["datatype"] == "BYTES":
        del parameters["content_type"]  # it described the JSON data
    other_fields = {key: value for key, value in entry.items() if key != "data"}
    return {**other_fields, "parameters": {**parameters, "binary_data_size": size}}
