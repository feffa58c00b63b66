"""Compiled kernels live in a folder of their own version, and one that cannot be written costs a compilation only."""

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numba
import pytest

import millpond
from millpond.kernels import cache
from millpond.source_hash import SOURCE_FOLDERS, source_hash

PACKAGE = Path(millpond.__file__).parent


@pytest.fixture
def own_copy(tmp_path):
    """A copy of the sources that make kernels, and the hash that its own module gives them."""
    copy = tmp_path / "millpond"
    for folder in SOURCE_FOLDERS:
        shutil.copytree(PACKAGE / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))

    shutil.copy(PACKAGE / "source_hash.py", copy)

    def hash_of_copy():
        spec = importlib.util.spec_from_file_location("copied_hash", copy / "source_hash.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.source_hash()

    return copy, hash_of_copy


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """No cache folder chosen yet, and a temporary folder of the test's own."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path


def test_the_same_sources_have_the_same_hash(own_copy):
    _, hash_of_copy = own_copy
    assert hash_of_copy() == hash_of_copy() == source_hash()


@pytest.mark.parametrize(
    "name", ["kernels/simd.py", "kernels/link.py", "model/forward.py", "runner/sampler_kernels.py"]
)
def test_a_change_in_any_source_of_kernels_changes_the_hash(own_copy, name):
    copy, hash_of_copy = own_copy
    before = hash_of_copy()
    with (copy / name).open("a") as source:
        source.write("\n")
    assert hash_of_copy() != before


def test_another_version_of_the_compiler_changes_the_hash(monkeypatch):
    before = source_hash()
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.0")
    assert source_hash() != before


def test_the_folder_is_the_users_cache_and_named_after_the_hash(unset, monkeypatch):
    monkeypatch.setattr(cache.platformdirs, "user_cache_path", lambda name: unset / "user" / name)
    cache.use_cache_folder()
    folder = Path(numba.config.CACHE_DIR)
    assert folder == unset / "user" / "millpond" / "kernels" / source_hash()
    assert list(folder.iterdir()) == []


def test_a_folder_that_the_user_chose_is_used_as_it_is(unset, monkeypatch, capsys):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(unset / "chosen"))
    cache.use_cache_folder()
    assert str(unset / "chosen") == numba.config.CACHE_DIR
    assert list((unset / "chosen").iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_where_the_cache_cannot_be_written_that_is_said_and_a_private_temporary_folder_serves(
    unset, monkeypatch, capsys
):
    (unset / "file").write_text("not a folder")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(unset / "file" / "kernels"))
    cache.use_cache_folder()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("millpond: compiled kernels cannot be kept")
    assert str(unset / "file" / "kernels") in line
    folder = Path(numba.config.CACHE_DIR)
    assert folder.parent == unset / "temporary"
    assert folder.is_dir()
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0 or os.name == "nt"


def test_a_temporary_folder_that_another_left_there_is_not_trusted(unset, monkeypatch):
    """Compiled code is loaded from it: whoever can write there can run anything as this user."""
    (unset / "file").write_text("not a folder")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(unset / "file" / "kernels"))
    planted = unset / "temporary" / f"millpond-kernels-{source_hash()}"
    planted.mkdir(mode=0o777)
    cache.use_cache_folder()
    assert Path(numba.config.CACHE_DIR) != planted


def test_the_temporary_folder_is_gone_when_the_process_has_ended(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "temporary").mkdir()
    places = {"NUMBA_CACHE_DIR": str(tmp_path / "file" / "kernels"), "TMPDIR": str(tmp_path / "temporary")}
    code = "import millpond.kernels.cache as c; print(c.folder_in_use().is_dir(), c.folder_in_use())"
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]
    done = subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True, check=True)
    was_there, folder = done.stdout.split()
    assert (was_there, Path(folder).parent) == ("True", tmp_path / "temporary")
    assert list((tmp_path / "temporary").iterdir()) == []
