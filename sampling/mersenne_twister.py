"""MT19937, which PyTorch's generators on CPU are, brought forward by any number of outputs at once.

The state is linear over GF(2), so that a state n steps on is a sum of the next 19,937 states, which the
remainder of t^n by the generator's characteristic polynomial names (Haramoto, Matsumoto, Nishimura, Panneton
and L'Ecuyer, "Efficient jump ahead for F2-linear random number generators", 2008, section 3). The polynomial
is that of Matsumoto and Nishimura, "Mersenne Twister", 1998, appendix A. Polynomials are integers here, with
bit i for t^i.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORDS: Final = 624
"""Of a state."""
_MIDDLE: Final = 397
_LOWER_BITS: Final = 31
_TWIST: Final = 0x9908B0DF
_UPPER_MASK, _LOWER_MASK = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_DEGREE: Final = 19937
_AT_ONCE: Final = 1024
"""States that are summed at a time."""


def ahead(words: NDArray[np.uint32], used: int, outputs: int) -> tuple[NDArray[np.uint32], int]:
    """The state after more outputs; takes about as long for a hundred thousand as for a billion.

    Args:
        words: The state's 624 words.
        used: How many of them have been given out, 1 to 624.
        outputs: How many more of 32 bits are.

    Returns:
        The words, and how many of them have been given out then.
    """
    twists = (used + outputs - 1) // WORDS
    if twists:
        words = _sum_of_windows(words, _remainder_of_power(twists * WORDS - 1))
    return words, used + outputs - twists * WORDS


def _sum_of_windows(words: NDArray[np.uint32], polynomial: int) -> NDArray[np.uint32]:
    """The 624 words from which on a sequence goes that begins with `words`, one step after what is named.

    That one step leaves out the first word's lower bits, which are no part of the state.
    """
    windows = sliding_window_view(_sequence(words, 1 + _DEGREE + WORDS), WORDS)[1:]
    bits = np.frombuffer(polynomial.to_bytes(-(-_DEGREE // 8), "little"), np.uint8)
    named = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    total = np.zeros(WORDS, np.uint32)
    for start in range(0, len(named), _AT_ONCE):
        total ^= np.bitwise_xor.reduce(windows[named[start : start + _AT_ONCE]], axis=0)
    return total


def _sequence(words: NDArray[np.uint32], length: int) -> NDArray[np.uint32]:
    """So many words of the sequence that begins with a state."""
    blocks = -(-length // WORDS)
    made = np.empty((blocks, WORDS), np.uint32)
    made[0] = words
    for number in range(1, blocks):
        _twist(made[number - 1], made[number])
    return made.reshape(-1)[:length]


def _twist(old: NDArray[np.uint32], new: NDArray[np.uint32]) -> None:
    """Write the 624 words that follow: each depends on one that is 227 before it, in places among the new."""
    step = WORDS - _MIDDLE
    last = WORDS - 1
    mixed = _mixed(old[:last], old[1:])
    new[:step] = old[_MIDDLE:] ^ mixed[:step]
    new[step : 2 * step] = new[:step] ^ mixed[step : 2 * step]
    new[2 * step : last] = new[step : last - step] ^ mixed[2 * step :]
    new[last:] = new[_MIDDLE - 1] ^ _mixed(old[last:], new[:1])


def _mixed(upper: NDArray[np.uint32], lower: NDArray[np.uint32]) -> NDArray[np.uint32]:
    joined = (upper & _UPPER_MASK) | (lower & _LOWER_MASK)
    return (joined >> np.uint32(1)) ^ ((joined & np.uint32(1)) * np.uint32(_TWIST))


@lru_cache(maxsize=64)
def _remainder_of_power(exponent: int) -> int:
    """What t^exponent leaves when divided by the characteristic polynomial."""
    below = _terms_below()
    made = 1
    for bit in f"{exponent:b}":
        made = int("0".join(f"{made:b}"), 2)  # squared
        made <<= bit == "1"
        while high := made >> _DEGREE:
            made &= (1 << _DEGREE) - 1
            for term in below:
                made ^= high << term
    return made


@lru_cache(maxsize=1)
def _terms_below() -> tuple[int, ...]:
    """The exponents of the characteristic polynomial below its degree."""
    made = _times_upper(_power_of_lower(_LOWER_BITS))
    for bit in range(_LOWER_BITS):
        if _TWIST >> bit & 1:
            made ^= _times_upper(_power_of_lower(_LOWER_BITS - 1 - bit))
    made ^= _TWIST >> _LOWER_BITS & 1
    return tuple(term for term in range(_DEGREE) if made >> term & 1)


def _times_upper(polynomial: int) -> int:
    return (polynomial << WORDS) ^ (polynomial << _MIDDLE)


def _power_of_lower(exponent: int) -> int:
    made = 1
    for _ in range(exponent):
        made = (made << (WORDS - 1)) ^ (made << (_MIDDLE - 1))
    return made
