"""SentencePiece's table of replacements, checked before a library follows it out of bounds and panics.

Layout: bytes of the trie (uint32) | the trie, a double array of uint32 | the replacements, UTF-8, each ended by a zero.
Of a unit bit 8 says that the text so far is replaced, bit 31 that it is a value: where its replacement begins; bits 9
and up are where its children are, by exclusive or (darts-clone's format).
"""

from __future__ import annotations

import numpy as np

VALUE, HAS_VALUE, WIDE = np.uint32(1 << 31), np.uint32(1 << 8), np.uint32(1 << 9)
CHILDREN = 256  # of a unit, one for each byte, beside each other in any order


def is_whole(charsmap: bytes) -> bool:
    """Whether every way through the trie stays inside it, and every replacement begins where a character does."""
    size = int.from_bytes(charsmap[:4], "little")
    if size % (4 * CHILDREN) or not 0 < size <= len(charsmap) - 4:
        return False
    units, replacements = np.frombuffer(charsmap, "<u4", size // 4, 4), charsmap[4 + size :]
    try:
        replacements.decode()
    except UnicodeDecodeError:
        return False
    inner = (units & VALUE) == 0
    inner[0] = True  # where every text begins, whatever it is
    begins = np.flatnonzero(inner)
    found = units[inner]
    shift = np.where(found & WIDE, np.uint32(8), np.uint32(0))
    children = begins ^ ((found >> np.uint32(10)).astype(np.int64) << shift)
    if children.max() >= len(units):
        return False
    values = units[children[(found & HAS_VALUE) != 0]] & ~VALUE
    starts = np.frombuffer(replacements, np.uint8) & 0xC0 != 0x80
    return not len(values) or bool(values.max() < len(starts) and starts[values].all())
