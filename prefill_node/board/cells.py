"""Two ways to hand bytes from one writer to one process of readers, without a lock.

`Latest` keeps the newest value, `EventRing` every record until it is read. Both take a checksum over what
they copied, seeded with its place in the order of writes: x86-64 shows one processor's stores to others in
their order, aarch64 does not, and Python has no fence to ask for it. What is not wholly there yet does not
match, and counts as not yet written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from prefill_node.board.layout import WORD
from prefill_node.board.segment import Segment

_LENGTH_BITS = 32
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1
_TRIES = 16

T = TypeVar("T")


class Latest(Generic[T]):
    """The newest value of one writer, as a seqlock over two slots that are used in turn.

    The sequence word counts the values; the newest stands in slot `sequence % 2`, behind a word of checksum
    and length. The writer fills the other slot and then raises the sequence, so a writer that dies in
    between leaves the last value whole. A reader whose slot was meanwhile used again tries again, a bounded
    number of times, and then takes what it had before.
    """

    def __init__(
        self, segment: Segment, sequence_at: int, slots_at: int, slot_bytes: int, kind: type[T]
    ) -> None:
        self._words = segment.words
        self._data = segment.data
        self._sequence = sequence_at // WORD
        self._slots = (slots_at, slots_at + slot_bytes)
        self._capacity = slot_bytes - WORD
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._seen = 0
        self._value: T | None = None

    def store(self, value: T) -> bool:
        """Make a value the newest one; False, and nothing done, when it does not fit."""
        payload = self._encoder.encode(value)
        length = len(payload)
        if length > self._capacity:
            return False
        sequence = self._words[self._sequence] + 1
        slot = self._slots[sequence & 1]
        self._data[slot + WORD : slot + WORD + length] = payload
        self._words[slot // WORD] = _sealed(payload, sequence)
        self._words[self._sequence] = sequence
        return True

    def load(self) -> T | None:
        """The newest value that is wholly there; None before the first."""
        for _ in range(_TRIES):
            sequence = self._words[self._sequence]
            if sequence == self._seen:
                break
            slot = self._slots[sequence & 1]
            seal = self._words[slot // WORD]
            length = min(seal & _LENGTH_MASK, self._capacity)
            payload = bytes(self._data[slot + WORD : slot + WORD + length])
            if self._words[self._sequence] == sequence and _sealed(payload, sequence) == seal:
                self._value = self._decoder.decode(payload)
                self._seen = sequence
                break
        return self._value


class EventRing:
    """Records from one writer to one reader, in order, each read once.

    Positions count bytes ever written and ever read; each is one word that one side writes. A record is a
    word of checksum and length and the bytes, padded to whole words. When a record does not fit it is
    dropped with the rest of its batch, and counted: the reader is behind, and what it has not read yet is
    older.
    """

    def __init__(
        self, segment: Segment, written_at: int, read_at: int, ring_at: int, ring_bytes: int
    ) -> None:
        self._words = segment.words
        self._data = segment.data
        self._written = written_at // WORD
        self._dropped = self._written + 1
        self._read = read_at // WORD
        self._at = ring_at
        self._bytes = ring_bytes

    @property
    def dropped(self) -> int:
        """Records ever dropped."""
        return self._words[self._dropped]

    def append(self, records: Iterable[bytes]) -> int:
        """Write records, and return how many of them were dropped."""
        position = self._words[self._written]
        end = self._words[self._read] + self._bytes
        left = list(records)
        fitted = 0
        for record in left:
            after = position + _padded(len(record))
            if after > end:
                break
            self._words[(self._at + position % self._bytes) // WORD] = _sealed(record, position)
            self._copy_in(position + WORD, record)
            position = after
            fitted += 1
        self._words[self._written] = position
        dropped = len(left) - fitted
        if dropped:
            self._words[self._dropped] += dropped
        return dropped

    def take(self) -> list[bytes]:
        """Every record that has not been taken yet."""
        written = self._words[self._written]
        position = self._words[self._read]
        records = []
        while position < written:
            seal = self._words[(self._at + position % self._bytes) // WORD]
            length = seal & _LENGTH_MASK
            if position + _padded(length) > written:
                break
            record = self._copy_out(position + WORD, length)
            if _sealed(record, position) != seal:
                break
            records.append(record)
            position += _padded(length)
        self._words[self._read] = position
        return records

    def _copy_in(self, position: int, record: bytes) -> None:
        start = position % self._bytes
        first = min(len(record), self._bytes - start)
        self._data[self._at + start : self._at + start + first] = record[:first]
        self._data[self._at : self._at + len(record) - first] = record[first:]

    def _copy_out(self, position: int, length: int) -> bytes:
        start = position % self._bytes
        first = min(length, self._bytes - start)
        head = self._data[self._at + start : self._at + start + first]
        return bytes(head) + bytes(self._data[self._at : self._at + length - first])


def _sealed(payload: bytes, order: int) -> int:
    return zlib.crc32(payload, order & 0xFFFFFFFF) << _LENGTH_BITS | len(payload)


def _padded(length: int) -> int:
    return WORD + (length + WORD - 1) // WORD * WORD
