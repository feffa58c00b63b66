"""docs/MODELS.md says what runs."""

import runpy
from pathlib import Path

from millpond.model.architectures import ARCHITECTURES

ROOT = Path(__file__).parent.parent.parent


def test_the_page_of_models_is_what_the_architectures_make_of_it():
    made = runpy.run_path(str(ROOT / "scripts" / "models_table.py"))
    page = (ROOT / "docs" / "MODELS.md").read_text(encoding="utf-8")
    assert made["with_table"](page) == page, "run: python scripts/models_table.py"
    for name in ARCHITECTURES:
        assert f"`model/{name}.py`" in page
