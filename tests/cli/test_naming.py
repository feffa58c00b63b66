from __future__ import annotations

from types import SimpleNamespace

import pytest

from millpond.cli.naming import in_options


def option(name, *flags):
    return SimpleNamespace(name=name, opts=list(flags))


def command(*params, **commands):
    return SimpleNamespace(params=list(params), commands=commands)


SERVE = command(option("max_model_len", "--max-model-len"), option("seed", "--seed"), option("model", "model"))
SERVE_LIKE = command(option("blocks", "--blocks"), option("max_tokens", "--max-tokens"))
MILLPOND = command(option("debug", "--debug"), serve=SERVE, bench=command(fast=SERVE_LIKE))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_model_len must be 3", "--max-model-len must be 3"),
        ("give 4 (max_model_len), or 3 for max_model_len.", "give 4 (--max-model-len), or 3 for --max-model-len."),
        ("seed must be 3", "--seed must be 3"),
        ("set seed to 3", "set --seed to 3"),
        ("the seed of a reseed", "the seed of a reseed"),
        ("no file a/max_model_len or max_model_len.gguf, --max_model_len or a_max_model_len", None),
        ("model must be there", None),
        ("blocks must be 3", None),
    ],
)
def test_fields_become_the_options_of_the_command_that_was_called(message, shown):
    assert in_options(message, MILLPOND, ["--debug", "serve", "bench", "--seed", "1"]) == (shown or message)


def test_a_field_has_the_option_that_the_command_has_for_it_and_a_command_may_be_in_a_group():
    assert in_options("num_blocks is 3", MILLPOND, ["bench", "fast", "--blocks", "3"]) == "--blocks is 3"
    assert in_options("blocks must be 3, max_tokens 4", MILLPOND, ["bench", "fast"]) == "blocks must be 3, max_tokens 4"
    assert in_options("num_blocks is 3, seed must be", MILLPOND, ["bench"]) == "num_blocks is 3, seed must be"
