"""Reads a message whose tensors are JSON arrays, as it arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.codec.elements.base64_elements import Base64ElementDecoder
from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.json.array_scanner import ElementRun, StringPart
from gateway.codec.json.data_extractor import ArrayStart, DataExtractor, Event, placeholder
from gateway.codec.json.parsed_size import estimate_parsed_size
from gateway.codec.offload import FAILED_FUTURE, ConversionJob, Offloader, OffloadFuture
from gateway.errors import GatewayError, strip_tracebacks
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import ErrorVocabulary, Tensor
from gateway.protocol.json_errors import ExtractedArray
from gateway.protocol.request_header import Fields, describe_value, has_base64_content
from gateway.protocol.tensors import MAX_TENSORS, element_count

_MAX_RUNS_PER_STEP = 64
"""Runs that are cut or converted at once, at most: there may be one in every ten bytes."""
_STEP_BYTES = 16 * 1024
"""Bytes of runs that are enough to be converted at once: half of a window of strings."""

# Bytes that objects take beside the data, measured by tracemalloc.
_ARRAY_OVERHEAD = 500
"""An Array, and what takes its elements."""
_TENSOR_OVERHEAD = 250
"""What was checked of a tensor, beside the parsed header."""
_CHUNK_OVERHEAD = 48
"""What a run becomes, as bytes in a list."""
_QUEUED_RUN_OVERHEAD = 200
"""A run that waits, beside its text."""
_OFFLOADED_RUN_OVERHEAD = 500
"""A run that is converted elsewhere, likewise."""


class ElementSink(Protocol):
    """Takes the runs of one array, and holds what becomes of them; ``size`` is in bytes."""

    size: int

    def feed(self, item: ElementRun | StringPart) -> None:
        """Take the next run, or piece of a long string."""


@dataclass(frozen=True, slots=True)
class ParsedHeader:
    """The JSON around the data, with a stand-in for each array."""

    text: bytes
    fields: Fields
    tensors: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class _OffloadedRun:
    """A run that is converted elsewhere, and where in its tensor the result goes."""

    tensor: TensorDecoder
    place: int
    run: ElementRun
    future: OffloadFuture


class JsonMessageReader(ABC):
    """Takes the text of a message; has the elements of its arrays converted, run by run.

    ``header_cap`` is in bytes, ``depth_cap`` in levels of nesting, ``tensor_cap`` a number of
    tensors; ``lender`` may have numbers converted elsewhere. Holds the text of data for as long as
    what stands before it does not tell what becomes of it. What comes first in the text is
    converted first, so that of two errors the same one is raised however the text is split.
    """

    def __init__(
        self,
        message: ErrorVocabulary,
        header_cap: int,
        depth_cap: int,
        offloader: Offloader | None = None,
        tensor_cap: int = MAX_TENSORS,
    ) -> None:
        self._message = message
        self._extractor = DataExtractor(header_cap, depth_cap, message, tensor_cap)
        self._lender = offloader
        self._offloaded: deque[_OffloadedRun] = deque()
        self._arrays: list[DataArray] = []
        self._queue: deque[tuple[DataArray, ElementRun | StringPart]] = deque()
        self._queued_bytes = 0
        self._offloaded_bytes = 0
        self._converted_size = 0
        """Bytes of all that was converted: they are not summed up anew each time."""
        self._converted_count = 0
        """Items that those were made of."""
        self._header_size = 0
        self._events: Iterator[Event] | None = None
        self._is_last_fed = False
        self._failure: GatewayError | None = None
        self._header: ParsedHeader | None = None
        self._base64_decoders: deque[Base64ElementDecoder] = deque()

    @abstractmethod
    def _make_sink(self, label: str, fields: Fields) -> ElementSink | None:
        """Make what takes the data of a tensor of which these fields are known by now.

        ``label`` names it in errors. Gives None where more has to be known.
        """

    @abstractmethod
    def _parse_header(
        self, text: bytes, cuts: Sequence[ExtractedArray]
    ) -> tuple[Fields, Sequence[Tensor]]:
        """Parse the JSON around the data, which was cut out of it; raises GatewayError."""

    @property
    def preferred_read_size(self) -> int:
        """Give the bytes of text that are best fed next: any number will do."""
        return self._extractor.preferred_read_size

    def feed(self, text: bytes | memoryview, last: bool = False) -> None:
        """Take the next text of the message; ``last`` tells that it is the end.

        What there is to do with it is done by ``work``. Raises GatewayError that names what is
        wrong: 400, or 413 over the header cap; 502 for either in an answer.
        """
        while self._extract():
            pass
        if self._failure is None:
            self._events = self._extractor.feed(text, last)
            self._is_last_fed = last
            self._extract()
        if self._failure is not None:
            self.work()

    def _extract(self) -> bool:
        """Cut a share of the text; tell whether there was any, or the end of it.

        An error waits until what comes before it is converted.
        """
        if self._events is None or self._failure is not None:
            return False
        try:
            for _ in range(_MAX_RUNS_PER_STEP):
                event = next(self._events, None)
                if event is None:
                    self._events = None
                    if self._is_last_fed:
                        self._read_header()
                    break
                self._handle_event(event)
        except GatewayError as error:
            self._failure = strip_tracebacks(error)
        return True

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, ArrayStart):
            if self._arrays:
                self._update_array(self._arrays[-1], event.previous)
            label = f"{self._message.tensors}[{event.index}]"
            self._arrays.append(DataArray(event.index, label))
            self._update_array(self._arrays[-1], event.fields)
        else:
            self._queue.append((self._arrays[-1], event))
            self._queued_bytes += len(event)

    def _update_array(self, array: DataArray, fields: Fields) -> None:
        """Take note of a tensor's fields: what is there by now of its name and datatype, say."""
        name = fields.get("name")
        if isinstance(name, str):
            array.label = self._message.label(name)
        if array.elements is None:
            array.elements = self._make_sink(array.label, fields)

    def work(self) -> bool:
        """Convert some runs, or cut text, or decode a piece of base64; tell whether there were any.

        Raises GatewayError as ``feed`` does.
        """
        self._collect_offloaded()
        if self._convert_some() or self._extract():
            return True
        if self._failure is not None and not self._offloaded:
            raise self._failure
        return self._decode_base64()

    def _convert_some(self) -> bool:
        """Convert runs, as many small ones as take no longer than a large one."""
        size = 0
        for _ in range(_MAX_RUNS_PER_STEP):
            if size >= _STEP_BYTES or not self._queue:
                break
            array, item = self._queue[0]
            if array.elements is None:
                break
            self._queue.popleft()
            self._queued_bytes -= len(item)
            size += len(item)
            self._convert(array.elements, item)
        return size > 0

    def _decode_base64(self) -> bool:
        """Decode a piece of what came as base64, once all of the text is converted."""
        if self._offloaded or self._failure is not None or not self._base64_decoders:
            return False
        tensor = self._base64_decoders[0].tensor
        before = tensor.size
        if not self._base64_decoders[0].decode_chunk():
            self._base64_decoders.popleft()
        self._converted_size += tensor.size - before
        return True

    @property
    def buffered_data_bytes(self) -> int:
        """Give the bytes of data that are held, converted or not."""
        return self._converted_size + self._queued_bytes

    @property
    def held(self) -> int:
        """Give the bytes of memory that are held, objects and text beside the data included."""
        return (
            self._converted_size
            + _CHUNK_OVERHEAD * self._converted_count
            + self._queued_bytes
            + _QUEUED_RUN_OVERHEAD * len(self._queue)
            + self._offloaded_bytes
            + _OFFLOADED_RUN_OVERHEAD * len(self._offloaded)
            + _ARRAY_OVERHEAD * len(self._arrays)
            + self._extractor.held
            + self._header_size
        )

    @property
    def future(self) -> OffloadFuture | None:
        """Give the work lent out that has to be done before ``finish``, the first of it."""
        return self._offloaded[0].future if self._offloaded else None

    def _convert(self, elements: ElementSink, item: ElementRun | StringPart) -> None:
        """Convert an item, here or elsewhere; what is wrong with it waits for those before it."""
        if isinstance(elements, TensorDecoder) and isinstance(item, ElementRun):
            work = ConversionJob(to_json=False, datatype=elements.datatype)
            if work.can_be_offloaded:
                self._convert_or_offload(elements, item, work)
                return
        try:
            self._feed(elements, item)
        except GatewayError as error:
            if not self._offloaded:
                raise
            self._failure = strip_tracebacks(error)
            self._queue.clear()

    def _feed(self, elements: ElementSink, item: ElementRun | StringPart) -> None:
        """Convert an item here."""
        before = elements.size
        elements.feed(item)
        self._converted_size += elements.size - before
        self._converted_count += 1

    def _convert_or_offload(
        self, tensor: TensorDecoder, run: ElementRun, work: ConversionJob
    ) -> None:
        future = self._offload(work, run)
        if future is None:
            try:
                self._feed(tensor, run)
            except GatewayError:
                if not self._offloaded:
                    raise
                # Its fault is known once all before it is counted.
                future = FAILED_FUTURE
        if future is not None:
            self._offloaded.append(_OffloadedRun(tensor, tensor.reserve_chunk(), run, future))
            self._offloaded_bytes += len(run)

    def _offload(self, work: ConversionJob, run: ElementRun) -> OffloadFuture | None:
        if self._lender is None or run.lacks_element:
            return None
        return self._lender.submit(work, *run.pieces)

    def _collect_offloaded(self) -> None:
        """Take what was converted elsewhere, in order."""
        while self._offloaded and self._offloaded[0].future.done:
            lent = self._offloaded.popleft()
            self._offloaded_bytes -= len(lent.run)
            before = lent.tensor.size
            lent.tensor.fill_chunk(lent.place, lent.run, lent.future.result)
            self._converted_size += lent.tensor.size - before
            self._converted_count += 1

    def _finish_header(self) -> ParsedHeader:
        """Convert what still waits, and give the header."""
        while self.work():
            pass
        assert not self._offloaded
        assert self._header is not None
        return self._header

    def _read_header(self) -> None:
        """Read what stands around the data; what becomes of the last data may be told only here."""
        text = self._extractor.finish()
        fields, tensors = self._parse_header(text, self._extractor.extracted)
        entries = fields.get(self._message.tensors, [])
        self._check_placeholders(entries)
        self._header = ParsedHeader(text, fields, tensors)
        self._header_size = len(text) + estimate_parsed_size(text) + _TENSOR_OVERHEAD * len(tensors)
        for array in self._arrays:
            entry, declared = entries[array.index], tensors[array.index]
            self._update_array(array, entry)
            tensor = array.elements
            if not isinstance(tensor, TensorDecoder) or not has_base64_content(entry):
                continue
            if tensor.datatype is declared.datatype and tensor.datatype.family is Family.TEXT:
                label = self._message.label(declared.name)
                self._base64_decoders.append(Base64ElementDecoder(label, tensor, self._message))

    def _check_placeholders(self, entries: list[Fields]) -> None:
        """Check that every data is an array that was cut out, and stands where it was cut."""
        places = {array.index: placeholder(number) for number, array in enumerate(self._arrays)}
        key = self._message.tensors
        for index, entry in enumerate(entries):
            if "data" in entry and (index not in places or entry["data"] != places.pop(index)):
                raise self._not_extracted_error(entry, index)
        if places:
            raise self._message.malformed(f"{self._message.name} has the key {key} more than once")

    def _not_extracted_error(self, entry: Fields, index: int) -> GatewayError:
        """Make the error of data that were not seen as an array while the text came."""
        label = self._message.label_of(entry, index)
        if isinstance(entry["data"], list):
            return self._message.malformed(
                f'{label}: data must be given once, under the key "data" written without escapes'
            )
        return self._message.malformed(
            f"{label}: data must be an array, got {describe_value(entry['data'])}"
        )

    def _checked_tensor(self, array: DataArray, declared: Tensor) -> TensorDecoder:
        """Give a converted tensor; the header, which has the last word, must agree."""
        tensor = array.elements
        assert isinstance(tensor, TensorDecoder)
        label = self._message.label(declared.name)
        if tensor.datatype is not declared.datatype:
            raise self._message.malformed(f"{label} has more than one datatype")
        expected = element_count(declared.shape)
        if tensor.count != expected:
            raise self._message.malformed(
                f"{label}: shape {list(declared.shape)} takes {expected} elements, "
                f"data has {tensor.count}"
            )
        return tensor


class DataArray:
    """The data of one tensor; ``elements`` takes them, None while it is not known what does."""

    def __init__(self, index: int, label: str) -> None:
        self.index = index
        self.label = label
        self.elements: ElementSink | None = None
