from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import millpond


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_and_its_names_does_not_import_numba():
    code = """
import sys
import millpond
assert "millpond.engine" not in sys.modules
from millpond import LLM, Engine, EngineConfig, SamplingParams
from millpond.engine.async_engine import AsyncEngine
from millpond.serve.app import create_app
print([name for name in ("numba", "llvmlite", "torch") if name in sys.modules])
"""
    assert run_python(code).strip() == "[]"


def test_the_package_exports_what_it_names():
    for name in millpond.__all__:
        assert getattr(millpond, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        millpond.nonsense  # noqa: B018


def test_the_version_is_that_of_the_project_file():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert millpond.__version__ == project["version"]
