from __future__ import annotations

from pathlib import Path

import pytest

from millpond.cli.app import run
from millpond.cli.settings import Settings
from millpond.errors import ConfigError
from millpond.source_hash import source_hash


def test_an_empty_environment_gives_the_defaults():
    assert Settings.from_environment({}) == Settings(cache_folder=None, log_level="info", debug=False)
    assert Settings.from_environment({"MILLPOND_CACHE": "", "MILLPOND_LOG_LEVEL": ""}) == Settings()


def test_the_environment_sets_the_cache_folder_and_the_log_level():
    settings = Settings.from_environment({"MILLPOND_CACHE": "~/models", "MILLPOND_LOG_LEVEL": "DEBUG"})
    assert settings.cache_folder == Path.home() / "models"
    assert settings.log_level == "debug"


def test_the_environment_has_the_key_for_servers_and_it_is_not_shown():
    settings = Settings.from_environment({"OPENAI_API_KEY": "sk-1"})
    assert settings.openai_api_key == "sk-1"
    assert "sk-1" not in repr(settings)
    assert Settings.from_environment({"OPENAI_API_KEY": ""}).openai_api_key is None


def test_an_unknown_log_level_is_refused_with_the_levels_there_are():
    with pytest.raises(ConfigError, match="MILLPOND_LOG_LEVEL must be one of debug, info, warning, error, got 'loud'"):
        Settings.from_environment({"MILLPOND_LOG_LEVEL": "loud"})


def test_the_home_folder_of_nobody_is_refused():
    with pytest.raises(ConfigError, match="MILLPOND_CACHE is '~no-such-user/x', but there is no such user"):
        Settings.from_environment({"MILLPOND_CACHE": "~no-such-user/x"})


@pytest.mark.parametrize(
    ("environment", "kernels"),
    [
        ({}, None),
        ({"MILLPOND_CACHE": "/elsewhere"}, f"/elsewhere/kernels/{source_hash()}"),
        ({"MILLPOND_CACHE": "/elsewhere", "NUMBA_CACHE_DIR": ""}, f"/elsewhere/kernels/{source_hash()}"),
        ({"MILLPOND_CACHE": "/elsewhere", "NUMBA_CACHE_DIR": "/own"}, "/own"),
    ],
)
def test_kernels_are_kept_in_our_cache_folder_unless_numba_was_told_of_another(environment, kernels):
    assert run(["version"], environment) == 0
    assert environment.get("NUMBA_CACHE_DIR") == kernels
