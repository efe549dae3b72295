"""Where everything stands on the board: offsets, sizes, and who writes what. Numbers only, no memory.

| offset | size | writer | meaning |
|---|---|---|---|
| 0 | 64 | creator | header: magic, layout version, ranks, size of the segment; the magic is written last |
| 64 | 64 | governor | target: id of the step to be stopped, 0 for none |
| 128 | 64 | governor | sequence of the stop order |
| 192 | 64 | governor | events: bytes ever read |
| 256 | 64 | scheduler | sequence of the scheduler's view |
| 320 | 64 | scheduler | events: bytes ever written; records ever dropped |
| 384 | 2 x 4 KiB | governor | the two slots of the stop order |
| 8,576 | 2 x 256 KiB | scheduler | the two slots of the scheduler's view |
| 532,864 | 256 KiB | scheduler | ring of events |
| 795,008 | 128 each | worker of a rank | progress: step id << 16 with boundary, when that step began in ns |
| + 16 | | worker of a rank | boundaries ever reached, votes ever timed out |
| + 64 | | worker of a rank | its two vote cells |

Every number is a native 64-bit word on an address that it divides; reading or writing one through a
memoryview cast to "Q" is one machine instruction on x86-64 and aarch64. Every field has one writer, and the
fields of different writers never share a cache line, nor do the words that somebody spins on and the bulk
data.
"""

from __future__ import annotations

WORD = 8
CACHE_LINE = 64

MAGIC = int.from_bytes(b"SLKBOARD", "little")
VERSION = 1
HEADER_BYTES = CACHE_LINE

TARGET_AT = 64
ORDER_SEQUENCE_AT = 128
EVENTS_READ_AT = 192
VIEW_SEQUENCE_AT = 256
EVENTS_WRITTEN_AT = 320

ORDER_SLOT_BYTES = 4 * 1024
ORDER_SLOTS_AT = 384
VIEW_SLOT_BYTES = 256 * 1024
VIEW_SLOTS_AT = ORDER_SLOTS_AT + 2 * ORDER_SLOT_BYTES
EVENTS_BYTES = 256 * 1024
EVENTS_AT = VIEW_SLOTS_AT + 2 * VIEW_SLOT_BYTES

RANKS_AT = EVENTS_AT + EVENTS_BYTES
RANK_BYTES = 2 * CACHE_LINE

STEP_BITS = 40
BOUNDARY_BITS = 16
BOUNDARY_MASK = (1 << BOUNDARY_BITS) - 1


def segment_bytes(ranks: int) -> int:
    """Size of a board for so many ranks."""
    return RANKS_AT + ranks * RANK_BYTES


def progress_word(rank: int) -> int:
    """Index of the word in which a rank says how far it is; the next says when it began that step."""
    return (RANKS_AT + rank * RANK_BYTES) // WORD


def vote_words(rank: int) -> tuple[int, int]:
    """Indices of the two words that a rank votes with in turn."""
    first = (RANKS_AT + rank * RANK_BYTES + CACHE_LINE) // WORD
    return first, first + 1
