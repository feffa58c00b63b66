"""Messages to prompt text, by the chat template that the model file carries, in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from millpond.errors import InvalidRequestError, ModelFileError
from millpond.text.marks import RenderedChat, marks_for
from millpond.text.messages import normalize_messages
from millpond.text.template_budget import Budget, Refusal
from millpond.text.template_cost import is_cheap
from millpond.text.template_filters import BUDGET
from millpond.text.template_sandbox import Sandbox

MAX_STEPS = 1_000_000
MAX_CHARACTERS = 64 * 2**20

_END_MARK = "\ue000the answer goes on here\ue000"  # of a private character, so that no template looks for it
# What a template's own expressions can raise: it is a program, and the messages are its input.
_TEMPLATE_FAULTS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, NameError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip


class ChatTemplate:
    """A chat template, compiled once; safe to use from several threads at once.

    It runs as it does in transformers: the same sandbox, whitespace rules, filters and functions, but
    for a few that no prompt needs. A template of
    None is a model without one. special_tokens are the texts of bos_token, eos_token and so on; `now` is the clock
    of strftime_now. ModelFileError for a syntax error. tool_template takes its place where there are tools; kept_text
    matches the special tokens that a message may spell without their becoming special.

    A template cannot wait and has no unbounded loop, but it can nest loops, call itself and make long values, so a
    rendering may take at most max_steps turns of loops, calls, and parts of the work of filters and operators
    (`text/template_budget.py`), and give at most max_characters, as may each value that it makes. is_cheap says that
    what it takes grows with the messages alone (`text/template_cost.py`).
    """

    def __init__(
        self,
        template: str | None,
        special_tokens: Mapping[str, str],
        *,
        tool_template: str | None = None,
        kept_text: re.Pattern[str] | None = None,
        now: Callable[[], datetime] = datetime.now,
        max_steps: int = MAX_STEPS,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._max_steps = max_steps
        self._max_characters = max_characters
        # Only templates that know of developers can be given one; to the others it is the older word for it.
        given = [each for each in (template, tool_template) if each is not None]
        self._knows_developer = any("developer" in each for each in given)
        self._template = None if template is None else _compile(template, now)
        self._tool_template = None if tool_template is None else _compile(tool_template, now)
        self._kept_text = kept_text
        self.is_cheap = all(map(is_cheap, given))

    @property
    def is_missing(self) -> bool:
        return self._template is None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        is_unwanted: Callable[[], bool] = lambda: False,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> RenderedChat:
        """The prompt text; `Tokenizer.encode_chat` makes ids of it. `kwargs` are variables for the template.

        With continue_final_message it ends where the last message's own words do, for the answer to go on from there.
        Once is_unwanted() says so, nobody waits for it, and it ends with the next turn of a loop, call or the like.
        InvalidRequestError, with the template's own message where it refuses the messages, and for messages that
        `normalize_messages` refuses, for a model without a template, and for a rendering that grows without end.
        """
        template = self._tool_template if self._tool_template is not None and kwargs.get("tools") else self._template
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template, so it cannot chat; give it a plain prompt as a completion", "messages"
            )
        given = {**kwargs, "messages": self._known_roles(normalize_messages(messages))}
        marks = marks_for(self._kept_text, given)
        given = marks.around(given) if marks else given
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **given,
            "messages": _marked(given["messages"], continue_final_message),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            BUDGET: Budget(self._max_steps, self._max_characters, is_unwanted),
        }
        try:
            text = self._joined(template.generate(variables))
            text = _before_mark(text) if continue_final_message else text
            return marks.taken_out(text) if marks else RenderedChat(text)
        except Refusal as refusal:
            raise InvalidRequestError(str(refusal), "messages") from refusal
        except _TEMPLATE_FAULTS as error:
            message = f"the model's chat template failed on these messages: {str(error) or type(error).__name__}"
            raise InvalidRequestError(message, "messages") from error

    def _known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._knows_developer:
            return messages
        return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]

    def _joined(self, pieces: Iterable[str]) -> str:
        parts: list[str] = []
        num_characters = 0
        for piece in pieces:
            num_characters += len(piece)
            if num_characters > self._max_characters:
                raise Refusal(f"the chat template gave more than {self._max_characters} characters")
            parts.append(piece)
        return "".join(parts)


def _marked(messages: list[dict[str, Any]], is_wanted: bool) -> list[dict[str, Any]]:
    """The messages with a mark behind the words of the last, where the template's text is to be cut."""
    if not is_wanted:
        return messages
    *before, last = messages
    if not last["content"].strip():
        param = f"messages[{len(before)}].content"
        raise InvalidRequestError(f"{param} is empty, so continue_final_message has nothing to continue", param)
    return [*before, {**last, "content": last["content"] + _END_MARK}]


def _before_mark(text: str) -> str:
    place = text.rfind(_END_MARK)
    if place < 0:
        message = "the model's chat template does not write the final message as it is, so it cannot be continued"
        raise InvalidRequestError(message, "continue_final_message")
    return text[:place]


def _compile(source: str, now: Callable[[], datetime]) -> Any:
    def strftime_now(pattern: str) -> str:
        return now().strftime(pattern)

    sandbox = Sandbox()
    sandbox.globals.update(raise_exception=_raise_exception, strftime_now=strftime_now)
    try:
        return sandbox.from_string(sandbox.charged(source))
    except TemplateSyntaxError as error:
        raise ModelFileError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
    except ValueError as error:  # a number that Python does not read
        raise ModelFileError(f"the chat template has an error: {error}") from error
    except (SyntaxError, RecursionError) as error:  # jinja2 writes Python, which bounds how deep blocks may nest
        raise ModelFileError(f"the chat template is nested too deep: {error}") from error


def _raise_exception(message: str) -> None:
    raise Refusal(message)
