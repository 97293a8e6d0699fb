"""Reads messages whose tensors are JSON arrays while they arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from gateway.codec.elements.base64_elements import Base64ElementDecoder
from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.json.array_scanner import ElementRun, StringPart
from gateway.codec.json.data_extractor import ArrayStart, DataExtractor, Event, placeholder
from gateway.codec.json.parse_cost import estimate_parsed_size
from gateway.codec.offload_interface import Offloader, OffloadFuture
from gateway.errors import GatewayError, strip_tracebacks
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import ErrorVocabulary, Tensor
from gateway.protocol.json_errors import ExtractedArray, describe_value
from gateway.protocol.messages import Fields
from gateway.protocol.request_header import has_base64_content
from gateway.protocol.tensors import MAX_TENSORS, element_count
from gateway.sizes import CHUNK_OVERHEAD

_STEP_WORK: Final = 16 * 1024
"""The work of one step, in bytes of text that are converted here: half of a window of strings."""
_ITEM_WORK: Final = 256
"""The least work of an item: every ten bytes may be one."""
_WINDOW_WORK: Final = 4 * 1024
"""The most work to extract an item, or to have it converted elsewhere."""

# Bytes of memory of objects beside the data, measured by tracemalloc.
_ARRAY_OVERHEAD: Final = 500
"""A DataArray and its sink."""
_TENSOR_OVERHEAD: Final = 250
"""The checked description of a tensor, beside the parsed header."""
_QUEUED_RUN_OVERHEAD: Final = 200
"""A queued run, beside its text."""
_OFFLOADED_RUN_OVERHEAD: Final = 500
"""An offloaded run, beside its text."""


class ElementSink(Protocol):
    """Takes the runs of one array; ``size`` counts the bytes that they became."""

    size: int

    def feed(self, item: ElementRun | StringPart) -> None:
        """Take the next run, or the next piece of a long string."""


class OffloadedRun:
    """A run of numbers that is converted elsewhere, or was converted here while others were."""

    def __init__(
        self, tensor: TensorDecoder, run: ElementRun, result: OffloadFuture | tuple[int, bytes]
    ) -> None:
        self.tensor = tensor
        self.run = run
        self.result = result
        """The job elsewhere; or the number of elements, and their bytes."""


class JsonMessageReader(ABC):
    """Reads the text of a message, and has the elements of its arrays converted run by run.

    ``header_cap`` limits the JSON around the data in bytes, ``depth_cap`` the nesting,
    ``tensor_cap`` the tensors. Numbers may be converted by the ``offloader``.

    The text of data is queued until the fields before it tell how to convert it. Conversion follows
    the order of the text. So of two errors the same one is raised however the text is split.
    """

    def __init__(
        self,
        words: ErrorVocabulary,
        header_cap: int,
        depth_cap: int,
        offloader: Offloader | None = None,
        tensor_cap: int = MAX_TENSORS,
    ) -> None:
        self._words = words
        self._extractor = DataExtractor(header_cap, depth_cap, words, tensor_cap)
        self._offloader = offloader
        self._offloaded: deque[OffloadedRun] = deque()
        self._arrays: list[DataArray] = []
        self._queue: deque[tuple[DataArray, ElementRun | StringPart]] = deque()
        self._work = 0
        """What the current step has done."""
        self._is_blocked = False
        """Whether the first item of the queue has an error that waits for offloaded runs."""
        self.buffered_data_bytes = 0
        """Bytes of data buffered, converted or not, so that they are not summed up each time."""
        self._converted_count = 0
        """The number of chunks of converted data."""
        self.header_size = 0
        """The memory in bytes of the parsed header; 0 before."""
        self._events: Iterator[Event] | None = None
        self._is_last_fed = False
        self._failure: GatewayError | None = None
        self._text = b""
        """The JSON around the data, with a placeholder for each array."""
        self._fields: Fields = {}
        """The same, parsed."""
        self._base64_decoders: deque[Base64ElementDecoder] = deque()

    @abstractmethod
    def _make_sink(self, label: str, fields: Fields) -> ElementSink | None:
        """Make the sink for a tensor's data, given the fields known so far.

        ``label`` names the tensor in errors. Returns None if more fields are needed.
        """

    @abstractmethod
    def _parse_header(
        self, text: bytes, cuts: Sequence[ExtractedArray]
    ) -> tuple[Fields, Sequence[Tensor]]:
        """Parse the JSON around the data; ``cuts`` are the arrays extracted from it."""

    @property
    def preferred_read_size(self) -> int:
        """Return the size of text to feed next; any other size works too."""
        return self._extractor.preferred_read_size

    def feed(
        self, text: bytes | memoryview, last: bool = False, whole: memoryview | None = None
    ) -> None:
        """Take the next text of the message, of which ``whole`` has all; ``last`` marks the end.

        ``step`` converts it. Raises GatewayError that names what is invalid: 400, or 413 over the
        header cap; 502 for either in a response.
        """
        while self._extract():
            pass
        if self._failure is None:
            self._events = self._extractor.feed(text, last, whole)
            self._is_last_fed = last
            self._work = 0
            while self._work < _STEP_WORK and self._extract():
                pass
        if self._failure is not None:
            self.step()

    def _extract(self) -> bool:
        """Extract the next item of the text; return whether there was any, or its end.

        An error is raised only once the data before it is converted.
        """
        if self._events is None or self._failure is not None:
            return False
        self._work += _ITEM_WORK
        try:
            event = next(self._events, None)
            if event is not None:
                self._handle_event(event)
            else:
                self._events = None
                if self._is_last_fed:
                    self._read_header()
        except GatewayError as error:
            self._failure = strip_tracebacks(error)
        return True

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, ArrayStart):
            if self._arrays:
                self._update_array(self._arrays[-1], event.previous)
            label = f"{self._words.tensors}[{event.index}]"
            self._arrays.append(DataArray(event.index, label))
            self._update_array(self._arrays[-1], event.fields)
        else:
            array = self._arrays[-1]
            if array.sink is None and isinstance(event, ElementRun):
                event.detach()
            self._queue.append((array, event))
            self.buffered_data_bytes += len(event)
            self._work += min(len(event), _WINDOW_WORK)

    def _update_array(self, array: DataArray, fields: Fields) -> None:
        """Update what is known of a tensor: its name and its sink."""
        name = fields.get("name")
        if isinstance(name, str):
            array.label = self._words.label(name)
        if array.sink is None:
            array.sink = self._make_sink(array.label, fields)

    def step(self) -> bool:
        """Do one step: extract and convert text, or decode base64; return whether there was work.

        Raises GatewayError as ``feed`` does.
        """
        self._collect_offloaded()
        self._work = 0
        while self._work < _STEP_WORK and (self._convert_next() or self._extract()):
            pass
        if self._work:
            return True
        if self._failure is not None and not self._offloaded:
            raise self._failure
        return self._decode_base64()

    def _convert_next(self) -> bool:
        """Convert the first item of the queue; return whether that was possible."""
        if not self._queue or (self._is_blocked and self._offloaded):
            return False
        array, item = self._queue[0]
        if array.sink is None:
            return False
        self._is_blocked = not self._convert(array.sink, item)
        if self._is_blocked:
            return False
        self._queue.popleft()
        return True

    def _decode_base64(self) -> bool:
        """Decode a chunk of base64, once all text is converted."""
        if self._offloaded or self._failure is not None or not self._base64_decoders:
            return False
        tensor = self._base64_decoders[0].tensor
        before = tensor.size
        if not self._base64_decoders[0].decode_chunk():
            self._base64_decoders.popleft()
        self.buffered_data_bytes += tensor.size - before
        return True

    @property
    def buffered_bytes(self) -> int:
        """Return the memory in bytes: data, text and objects."""
        return (
            self.buffered_data_bytes
            + CHUNK_OVERHEAD * self._converted_count
            + _QUEUED_RUN_OVERHEAD * len(self._queue)
            + _OFFLOADED_RUN_OVERHEAD * len(self._offloaded)
            + _ARRAY_OVERHEAD * len(self._arrays)
            + self._extractor.buffered_bytes
            + self.header_size
        )

    @property
    def future(self) -> OffloadFuture | None:
        """Return the first offloaded job that must be done before ``finish``."""
        result = self._offloaded[0].result if self._offloaded else None
        return None if isinstance(result, tuple) else result

    def _convert(self, sink: ElementSink, item: ElementRun | StringPart) -> bool:
        """Convert an item here or elsewhere; False if its error waits for offloaded runs.

        Those stand before it in the text, and their elements count in the index of its own.
        """
        if (
            self._offloader is not None
            and isinstance(sink, TensorDecoder)
            and sink.datatype.size is not None
            and isinstance(item, ElementRun)
        ):
            result = self._offload(sink, item, self._offloader)
            if result is not None:
                self._offloaded.append(OffloadedRun(sink, item, result))
                return True
        try:
            self._feed(sink, item)
        except GatewayError:
            if not self._offloaded:
                raise
            return False
        return True

    def _offload(
        self, tensor: TensorDecoder, run: ElementRun, offloader: Offloader
    ) -> OffloadFuture | tuple[int, bytes] | None:
        """Return what becomes of numbers: converted elsewhere, or here if others are not done."""
        if not run.lacks_element:
            before, after = run.depth_before, run.depth_after
            future = offloader.decode(run.view, tensor.datatype, before, after)
            if future is not None:
                self._work += _ITEM_WORK + min(len(run), _WINDOW_WORK)
                return future
        if not self._offloaded:
            return None
        self._work += _ITEM_WORK + len(run)
        return tensor.try_decode(run)

    def _feed(self, sink: ElementSink, item: ElementRun | StringPart) -> None:
        """Convert an item here."""
        before = sink.size
        self._work += _ITEM_WORK + len(item)
        sink.feed(item)
        self.buffered_data_bytes += sink.size - before - len(item)
        self._converted_count += 1

    def _collect_offloaded(self) -> None:
        """Collect offloaded results in order."""
        while self._offloaded and ((future := self.future) is None or future.done):
            offloaded = self._offloaded.popleft()
            tensor, run, result = offloaded.tensor, offloaded.run, offloaded.result
            if isinstance(result, tuple):
                count, data = result
            else:
                converted = result.take_result()
                if converted is None:
                    self._feed(tensor, run)
                    continue
                count, data = len(converted) // (tensor.datatype.size or 1), converted
            tensor.append(count, data)
            self.buffered_data_bytes += len(data) - len(run)
            self._converted_count += 1

    def _finish_header(self) -> None:
        """Convert what is queued; then the header is known."""
        while self.step():
            pass
        assert not self._offloaded

    def _read_header(self) -> None:
        """Parse the JSON around the data; only now may the last sink be known."""
        text = self._extractor.finish()
        fields, tensors = self._parse_header(text, self._extractor.extracted)
        entries = fields.get(self._words.tensors, [])
        self._check_placeholders(entries)
        self._text, self._fields = text, fields
        self.header_size = len(text) + estimate_parsed_size(text) + _TENSOR_OVERHEAD * len(tensors)
        for array in self._arrays:
            entry, declared = entries[array.index], tensors[array.index]
            self._update_array(array, entry)
            tensor = array.sink
            if not isinstance(tensor, TensorDecoder) or not has_base64_content(entry):
                continue
            if tensor.datatype is declared.datatype and tensor.datatype.family is Family.TEXT:
                label = self._words.label(declared.name)
                self._base64_decoders.append(Base64ElementDecoder(label, tensor, self._words))

    def _check_placeholders(self, entries: list[Fields]) -> None:
        """Check that every ``data`` is the placeholder of an array of its own tensor."""
        places = {array.index: placeholder(number) for number, array in enumerate(self._arrays)}
        key = self._words.tensors
        for index, entry in enumerate(entries):
            if "data" in entry and (index not in places or entry["data"] != places.pop(index)):
                raise self._not_extracted_error(entry, index)
        if places:
            raise self._words.malformed(f"{self._words.name} has the key {key} more than once")

    def _not_extracted_error(self, entry: Fields, index: int) -> GatewayError:
        """Make the error for data that was not extracted as an array."""
        label = self._words.label_of(entry, index)
        if isinstance(entry["data"], list):
            return self._words.malformed(
                f'{label}: data must be given once, under the key "data" written without escapes'
            )
        return self._words.malformed(
            f"{label}: data must be an array, got {describe_value(entry['data'])}"
        )

    def _checked_tensor(self, array: DataArray, declared: Tensor) -> TensorDecoder:
        """Return a converted tensor; it must agree with the header."""
        tensor = array.sink
        assert isinstance(tensor, TensorDecoder)
        label = self._words.label(declared.name)
        if tensor.datatype is not declared.datatype:
            raise self._words.malformed(f"{label} has more than one datatype")
        expected = element_count(declared.shape)
        if tensor.count != expected:
            raise self._words.malformed(
                f"{label}: shape {list(declared.shape)} takes {expected} elements, "
                f"data has {tensor.count}"
            )
        return tensor


class DataArray:
    """The data of one tensor; ``sink`` is None until it is known."""

    def __init__(self, index: int, label: str) -> None:
        self.index = index
        self.label = label
        self.sink: ElementSink | None = None
