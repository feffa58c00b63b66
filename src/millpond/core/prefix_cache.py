"""The prefix cache: full blocks that are found again by their tokens and all the tokens before them.

A block's key is a hash of the key before it and its tokens; the salt begins the chain. Keys only find: on a hit the
tokens are compared, and the parent, which is the block before or, for the first one, the salt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from millpond.core.request import Request

Parent = int | str | None


class Link(NamedTuple):
    """What a block is: its tokens, behind the block before it or, for the first one, behind the request's salt.

    A parent cannot be mistaken: whoever holds a block holds its parent, so a parent is never evicted before it.
    """

    parent: Parent
    token_ids: tuple[int, ...]


class Prefix(NamedTuple):
    """The findable blocks at the start of a request, and the link that was missing; None where no more may be found."""

    block_ids: list[int]
    missing: Link | None


NOTHING = Prefix([], None)


def first_key(salt: str | None) -> int:
    """What stands for the key before the first block. Python's hash of a string differs from process to process."""
    return hash(("salt", salt))


def next_key(before: int, token_ids: tuple[int, ...]) -> int:
    return hash((before, token_ids))


class PrefixCache:
    """Which blocks hold which tokens. The pool (core/block_pool.py) has their holders and the order of eviction.

    on_forget, where it is set, hears of each block that can no longer be found.
    """

    def __init__(self, block_size: int, on_forget: Callable[[int], None] | None = None) -> None:
        self.block_size = block_size
        self._on_forget = on_forget
        self._links: dict[int, tuple[int, Link]] = {}  # key and link by block
        self._blocks: dict[int, list[int]] = {}  # by key, which few blocks share

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._links

    def __iter__(self) -> Iterator[int]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def link_of(self, block_id: int) -> Link:
        return self._links[block_id][1]

    def find(self, request: Request) -> Prefix:
        """The blocks that a request need not compute, in full blocks: its last token it always computes."""
        if not request.reads_prefix_cache:
            return NOTHING
        found: list[int] = []
        parent: Parent = request.sampling.cache_salt
        for index in range((request.num_tokens - 1) // self.block_size):
            link = Link(parent, self._token_ids(request, index))
            block_id = self._find(self._key(request, index), link)
            if block_id is None:
                return Prefix(found, link)
            found.append(block_id)
            parent = block_id
        return Prefix(found, None)

    def add(self, request: Request, index: int) -> int:
        """Make the request's block at an index findable, which it has computed in full and the ones before it as well.

        Returns the findable block of the same tokens: this one, or the one that somebody else has computed before.
        """
        parent = request.block_ids[index - 1] if index else request.sampling.cache_salt
        link, key = Link(parent, self._token_ids(request, index)), self._key(request, index)
        known = self._find(key, link)
        if known is not None:
            return known
        block_id = request.block_ids[index]
        self._links[block_id] = key, link
        self._blocks.setdefault(key, []).append(block_id)
        return block_id

    def forget(self, block_id: int) -> None:
        """The block is handed out to be written."""
        if self._on_forget is not None:
            self._on_forget(block_id)
        key, _ = self._links.pop(block_id)
        block_ids = self._blocks[key]
        block_ids.remove(block_id)
        if not block_ids:
            del self._blocks[key]

    def _find(self, key: int, link: Link) -> int | None:
        for block_id in self._blocks.get(key, ()):
            if self._links[block_id][1] == link:
                return block_id
        return None

    def _key(self, request: Request, index: int) -> int:
        """Each full block of a request is hashed once, however often it is looked up."""
        keys = request.block_keys
        while len(keys) <= index:
            before = keys[-1] if keys else first_key(request.sampling.cache_salt)
            keys.append(next_key(before, self._token_ids(request, len(keys))))
        return keys[index]

    def _token_ids(self, request: Request, index: int) -> tuple[int, ...]:
        return request.token_ids_between(index * self.block_size, (index + 1) * self.block_size)
