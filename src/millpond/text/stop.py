"""Stop strings: where a text ends, seen while it is still growing."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.errors import InvalidRequestError


class StopStrings:
    """Watches a text for the first of several stop strings and cuts there, whatever the pieces it comes in.

    The stop string that is complete first in the text wins, the longest of those that end together; its place in
    the list does not matter. The text ends right before it, or right after with `include`. What is held back is
    the longest end of the text that may still become a stop string, never more. `matched` is the one found.
    """

    __slots__ = ("_held", "_include", "_matchers", "matched")

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        if any(not text for text in stop):
            raise InvalidRequestError("stop must hold non-empty strings, got ''", "stop")
        self._matchers = [_Matcher(text) for text in stop]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def push(self, delta: str, *, may_stop: bool = True) -> str:
        """The text that is now certain to be part of the answer; nothing any more once stopped.

        With may_stop False a stop string that delta completes is passed over.
        """
        if self.stopped:
            return ""
        text = self._held + delta
        for end in range(len(self._held), len(text)):
            found = self._advance(text[end])
            if found is None:
                continue
            if may_stop:
                self.matched, self._held = found, ""
                return text[: end + 1] if self._include else text[: end + 1 - len(found)]
            for matcher in self._matchers:
                matcher.pass_over()
        keep = len(text) - max((matcher.length for matcher in self._matchers), default=0)
        self._held = text[keep:]
        return text[:keep]

    def _advance(self, character: str) -> str | None:
        complete = [matcher.text for matcher in self._matchers if matcher.advance(character)]
        return max(complete, key=len) if complete else None

    def finish(self) -> str:
        """The text held back, when no more is to come."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """One stop string's Knuth-Morris-Pratt automaton; `length` is how much of it the text seen so far ends with."""

    __slots__ = ("_shorter", "length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._shorter = _border_lengths(text)

    def advance(self, character: str) -> bool:
        """Take one character; true if the text now ends with the whole stop string."""
        length = self.length
        while length and self.text[length] != character:
            length = self._shorter[length - 1]
        if self.text[length] == character:
            length += 1
        self.length = length
        return length == len(self.text)

    def pass_over(self) -> None:
        """Go on looking behind a stop string that was complete and did not count."""
        if self.length == len(self.text):
            self.length = self._shorter[-1]


def _border_lengths(text: str) -> list[int]:
    """For every prefix of the text, the length of its longest proper prefix that is also its suffix."""
    lengths = [0]
    for character in text[1:]:
        length = lengths[-1]
        while length and text[length] != character:
            length = lengths[length - 1]
        lengths.append(length + 1 if text[length] == character else 0)
    return lengths
