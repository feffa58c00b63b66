"""What more than one folder of tests uses of the demo model, made once a session and only for a test that asks."""

from __future__ import annotations

import signal
from functools import cache
from importlib import import_module

import pytest

DEMO_MODEL_LEN = 2048

# A shell without job control starts its background jobs deaf to Ctrl-C, and what they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_path():
    """The demo model's file, fetched if it is not there."""
    return import_module("millpond.load.store").resolve("smollm2")


@pytest.fixture(scope="session")
def demo_runner(demo_path):
    """A function of dtype, ISA and kv_dtype: a runner of the demo model, built once for each. 128 blocks of 16."""
    config, build = import_module("millpond.config"), import_module("millpond.build")

    @cache
    def runner(dtype: str, isa: str = "auto", kv_dtype: str = "auto"):
        settings = config.EngineConfig(dtype=dtype, isa=isa, kv_dtype=kv_dtype, max_model_len=DEMO_MODEL_LEN)
        return build.build_model_runner(demo_path, settings)

    return runner
