"""Fixtures that import torch and the kernels only for a test that asks, so that the others are collected without."""

from __future__ import annotations

from importlib import import_module

import pytest


@pytest.fixture(scope="session")
def transformers_llama():
    return import_module("reference.transformers_llama")


@pytest.fixture(scope="session")
def build_model_runner():
    return import_module("millpond.build").build_model_runner


@pytest.fixture(scope="session")
def exact_model(transformers_llama, demo_path):
    """The demo model in transformers, in float64."""
    return transformers_llama.load_reference(demo_path)
