"""The shape of nested arrays, found by their brackets and commas while they stream by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gateway.codec.json.structure_scan import mask_strings
from gateway.errors import GatewayError, bad_request
from gateway.protocol.tensors import MAX_RANK, element_count

_Places = npt.NDArray[np.intp]

_BUT_MARKS = bytes(set(range(256)) - set(b"[],"))
_IS_MARK = bytes(code in b"[]," for code in range(256))

_LARGE = 2 * 1024
"""Bytes of text from which on numpy takes less time."""


def structural_marks(text: bytes) -> bytes:
    """Give the brackets and commas of text that holds whole strings only, outside of those."""
    if len(text) >= _LARGE and b'"' in text:
        codes, inside = mask_strings(text)
        is_mark = np.frombuffer(text.translate(_IS_MARK), np.uint8) > inside
        return np.compress(is_mark, codes).tobytes()
    if b'"' in text:
        if b"\\" in text:
            # What is escaped is neither a quote nor a backslash. Pairs go first, from the left.
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        text = b"".join(text.split(b'"')[::2])
    return text.translate(None, _BUT_MARKS)


class ShapeFinder:
    """Takes the brackets and commas of one array, of which the grammar is checked elsewhere.

    ``label`` names the tensor in errors. Arrays of the same depth must have the same length, and
    values stand in the deepest ones alone. An array of one element has the same marks as one of
    none; so the number of all elements has the last word.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._depth = 0
        self._commas = 0
        self._after_opening = True
        self._lengths: dict[int, int] = {}
        """By depth, from 1, how many items the first array there has."""
        self._closed: dict[int, int] = {}
        """By depth, how many arrays have closed."""
        self._rank: int | None = None

    def feed(self, marks: bytes) -> None:
        """Take the next marks; raises GatewayError (400) where the arrays are ragged."""
        codes = np.frombuffer(marks, np.uint8)
        brackets = np.flatnonzero(codes != ord(","))
        if not brackets.size:
            self._commas += len(marks)
            return
        commas = np.diff(brackets, prepend=-1) - 1
        commas[0] += self._commas
        self._commas = len(marks) - int(brackets[-1]) - 1
        opening = codes[brackets] == ord("[")
        after_opening = np.concatenate(([self._after_opening], opening[:-1]))
        self._after_opening = bool(opening[-1])
        depths = self._depth + np.cumsum(np.where(opening, 1, -1))
        self._depth = int(depths[-1])
        depths += ~opening  # the depth of the array that opens or closes here
        self._check_values(commas, opening, after_opening, depths)
        self._check_lengths(opening, depths)

    def _check_values(
        self,
        commas: _Places,
        opening: npt.NDArray[np.bool_],
        after_opening: npt.NDArray[np.bool_],
        depths: _Places,
    ) -> None:
        """Check the arrays that hold no others, and that beside others there are no values."""
        innermost = after_opening & ~opening
        # Between two arrays there is one comma; before the first one and behind the last, none.
        beside = ~innermost & (commas != (~after_opening & opening))
        if beside.any():
            raise self._ragged("values stand beside arrays")
        if not innermost.any():
            return
        found = depths[innermost]
        if self._rank is None:
            self._rank = int(found[0])
        if (found != self._rank).any():
            raise self._ragged("some values are nested deeper than others")
        self._check_length(self._rank, commas[innermost] + 1)

    def _check_lengths(self, opening: npt.NDArray[np.bool_], depths: _Places) -> None:
        """Check the arrays that hold others."""
        if self._rank is None:
            return
        closing = np.flatnonzero(~opening)
        depths = depths[closing]
        within = closing[depths == self._rank]
        before = self._closed.get(self._rank, 0) - len(within)
        for depth in range(self._rank - 1, int(depths.min(initial=self._rank)) - 1, -1):
            places = closing[depths == depth]
            # How many arrays had closed within, by the time that each of these did.
            items = before + np.searchsorted(within, places)
            before = self._closed.get(depth, 0)
            if places.size:
                # The first of them has those since the last one that closed before.
                since = before * self._lengths.get(depth, 0)
                self._check_length(depth, np.diff(items, prepend=since))
            within = places

    def _check_length(self, depth: int, lengths: _Places) -> None:
        expected = self._lengths.setdefault(depth, int(lengths[0]))
        wrong = np.flatnonzero(lengths != expected)
        closed = self._closed.get(depth, 0)
        if wrong.size:
            number = closed + int(wrong[0])
            raise self._ragged(
                f"at depth {depth}, array number {number} has {lengths[wrong[0]]} items, "
                f"those before it {expected}"
            )
        self._closed[depth] = closed + lengths.size

    def shape(self, count: int) -> tuple[int, ...]:
        """Give the shape, once all arrays are closed, of ``count`` elements.

        Raises GatewayError (400) where they are ragged after all.
        """
        if self._rank is None:
            return ()
        if self._rank > MAX_RANK:
            raise bad_request(
                f"{self._label} has {self._rank} dimensions; at most {MAX_RANK} may be"
            )
        shape = [self._lengths[depth] for depth in range(1, self._rank + 1)]
        if not count and shape[-1] == 1:
            shape[-1] = 0
        if element_count(shape) != count:
            raise self._ragged("some of its arrays are empty")
        return tuple(shape)

    def _ragged(self, why: str) -> GatewayError:
        return bad_request(f"{self._label} is no tensor, as its arrays are ragged: {why}")
