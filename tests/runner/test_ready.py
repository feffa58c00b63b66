"""When an engine is ready, everything that a request can call is compiled."""

import pytest

from after_ready import in_a_process
from tiny_llama import write_tiny_llama

ENTRIES = ("model.forward.walk_together", "model.forward.walk", "runner.sampler_kernels.sample_rows")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "settings", [("dtype=auto", "speculative=ngram"), ("dtype=float32",), ("kv_dtype=int8",)], ids=" ".join
)
def test_no_request_of_any_size_or_kind_compiles_or_loads_anything(tmp_path, settings):
    write_tiny_llama(tmp_path / "tiny.gguf", types={"*": "Q4_1"}, head_dim=32)
    got = in_a_process("compiled", tmp_path / "tiny.gguf", *settings)
    assert got["new"] == {}
    assert [got["ready"][f"millpond.{name}"] for name in ENTRIES] == [1, 1, 1], "something was compiled twice"
