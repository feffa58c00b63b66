"""What is wrong, in the words of the command line: the library names a config's fields, a person has given options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from millpond.config import EngineConfig, LoadLimits, ServerConfig

FIELDS = {field.name for config in (EngineConfig, ServerConfig, LoadLimits) for field in fields(config)} | {"api_key"}
# What a command has under another name.
OTHER_NAMES = {"num_blocks": "blocks", "max_num_seqs": "slots", "num_requests": "requests", "prefix_dir": "cache_dir"}


def in_options(message: str, command: Any, arguments: Sequence[str]) -> str:
    """A message with the options of the command that the arguments call, in place of a config's fields.

    A name of one word is also an ordinary word: it counts where the message says what it must be, or to set it.
    """
    for name, option in _options_of(_called(command, arguments)).items():
        bounded = rf"(?<![\w./-]){name}(?![\w/-]|\.\w)"
        pattern = bounded if "_" in name else rf"{bounded}(?= must be )|(?<=\bset ){bounded}"
        message = re.sub(pattern, option, message)
    return message


def _called(command: Any, arguments: Sequence[str]) -> Any:
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    return command


def _options_of(command: Any) -> Mapping[str, str]:
    options = {each.name: each.opts[0] for each in command.params if each.opts[0].startswith("--")}
    known = {name: option for name, option in options.items() if name in FIELDS}
    return {name: options[other] for name, other in OTHER_NAMES.items() if other in options} | known
