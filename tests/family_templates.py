"""Chat templates in the shapes of every family, with what their own templates ask of the renderer.

Those of `tests/templates` are written after the formats of the families, with the means that their templates use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"
TEMPLATES: dict[str, str] = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Tells the <weather> of a "town" & its temperature, in °C.',
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


def call(number: int, arguments: Any) -> dict[str, Any]:
    return {"id": f"call-{number:09d}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


USER, ANSWER = (
    {"role": "user", "content": "  How is it in Zürich?\n"},
    {"role": "assistant", "content": "It's <b>fine</b>."},
)
SYSTEM = {"role": "system", "content": "Be brief. "}
CALLING = {"role": "assistant", "content": "", "tool_calls": [call(1, {"town": "Zürich", "days": [1, 2.5, None]})]}
TWO_CALLS = {**CALLING, "tool_calls": [call(1, {"town": "Zürich"}), call(2, {})]}
RESULT = {"role": "tool", "content": '{"celsius": -3}', "tool_call_id": "call-000000001", "name": "weather"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine."}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "with a system": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And now?"}],
    "answered": [USER, ANSWER],
    "a call": [USER, CALLING, RESULT],
    "a call, answered": [SYSTEM, USER, CALLING, RESULT, ANSWER, USER],
    "two calls": [USER, TWO_CALLS, RESULT, {**RESULT, "tool_call_id": "call-000000002"}, ANSWER],
    "a thought": [USER, THOUGHT, {"role": "user", "content": "/no_think Again."}, THOUGHT],
    "out of order": [USER, USER],
}
