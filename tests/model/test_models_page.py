"""docs/MODELS.md says what runs."""

import runpy
from pathlib import Path

from millpond.load.dequantize import FLOATS, FOUR_BITS
from millpond.load.ggml_types import SUPPORTED
from millpond.model.architectures import ARCHITECTURES

ROOT = Path(__file__).parent.parent.parent


def test_the_page_of_models_is_what_the_architectures_make_of_it():
    made = runpy.run_path(str(ROOT / "scripts" / "models_table.py"))
    page = (ROOT / "docs" / "MODELS.md").read_text(encoding="utf-8")
    assert made["with_table"](page) == page, "run: python scripts/models_table.py"
    for name in ARCHITECTURES:
        assert f"`model/{name}.py`" in page


def test_the_page_lists_every_type_of_a_gguf_in_the_row_of_its_kernels():
    page = (ROOT / "docs" / "MODELS.md").read_text(encoding="utf-8")
    rows = {
        "| GGUF | ": ("bfloat16, or with `--quantize` 8 or 4 bits", FLOATS.keys()),
        "| | Q4_0": ("4 bits", FOUR_BITS),
        "| | Q5_0": ("8 bits", set(SUPPORTED) - FLOATS.keys() - FOUR_BITS),
    }
    for start, (kernels, kinds) in rows.items():
        (row,) = (line for line in page.splitlines() if line.startswith(start))
        _, _, listed, held, _ = (cell.strip() for cell in row.split("|"))
        assert held == kernels
        assert set(listed.split(", ")) == {kind.name for kind in kinds}
