"""The house rules that a machine can check: planes, sizes, errors, the environment, the documents."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from millpond.cli.app import make_app

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "millpond"
SOURCES = sorted(PACKAGE.rglob("*.py"))
ALL_PYTHON = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]
for folder in ("compare", "peers", "peers/engines", "peers/workers"):
    ALL_PYTHON += sorted((ROOT / "bench" / folder).glob("*.py"))
DOCUMENTS = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("ARCHITECTURE", "API", "MODELS", "PERFORMANCE", "DEPLOYMENT", "SECURITY", "DETERMINISM")
    ),
]

CONTROL = {"core", "text", "engine", "serve", "lab"}
DATA = {"load", "model", "kernels", "runner"}
COMPILERS = {"numba", "llvmlite", "torch", "triton"}

# Where a fault ends a step's requests, the engine, or a stream, and is logged: a step, the engine's thread, a stream.
BOUNDARIES = {
    "src/millpond/engine/engine.py",
    "src/millpond/engine/async_engine.py",
    "src/millpond/serve/sse.py",
}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
MAX_MODULE_DOCSTRING_LINES = 8


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    """The first part of a source's path inside the package: "core", or "llm.py" for a module at its top."""
    return path.relative_to(PACKAGE).parts[0]


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a source imports anywhere in it, absolute: "millpond.core.step", "numba"."""
    package = ("millpond", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def breaches(path: Path) -> Iterator[str]:
    """The imports of one source that cross between the planes where they must not."""
    room = room_of(path)
    for module in imports_of(path):
        parts = module.split(".")
        inner = parts[1] if parts[0] == "millpond" and len(parts) > 1 else ""
        if room not in DATA and room != "build.py" and parts[0] in COMPILERS:
            yield f"{name_of(path)} imports {module}: control never imports a compiler"
        if room in DATA and inner in (CONTROL - {"core"}) | {"cli", "build", "llm"}:
            yield f"{name_of(path)} imports {module}: data never imports {inner}"
        if room in CONTROL and inner in DATA | {"cli"}:
            yield f"{name_of(path)} imports {module}: only build.py joins control and data"
        if room == "core" and parts[0] != "millpond" and parts[0] not in sys.stdlib_module_names:
            yield f"{name_of(path)} imports {module}: core/ is standard library only"
        if room == "core" and inner in CONTROL - {"core"}:
            yield f"{name_of(path)} imports {module}: core/ knows nobody above it"


def test_no_import_crosses_between_the_planes():
    assert [breach for path in SOURCES for breach in breaches(path)] == []


def test_the_breach_finder_sees_each_kind_of_breach(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    cases = {
        "engine/a.py": "import numba",
        "serve/a.py": "from ..kernels import isa",
        "runner/a.py": "from millpond import text",
        "kernels/a.py": "def f():\n    import millpond.engine.engine",
        "core/a.py": "import numpy",
        "core/b.py": "from millpond.engine import engine",
    }
    for name, source in cases.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        assert list(breaches(path)), f"{source!r} in {name} went unseen"


def control_modules() -> list[str]:
    modules = []
    for path in SOURCES:
        if room_of(path) in DATA or room_of(path) == "build.py":
            continue
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return modules


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_control_module_imports_where_no_compiler_can_be_imported():
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in sorted(COMPILERS))
    imports = "\n".join(f"importlib.import_module({name!r})" for name in control_modules())
    run_python(f"import importlib, sys\n{blocked}\n{imports}")


@pytest.mark.parametrize("module", ["millpond", "millpond.cli.app"])
def test_importing_the_package_and_its_command_line_loads_nothing_heavy(module):
    heavy = ("numba", "numpy", "fastapi", "uvicorn", "tokenizers", "huggingface_hub", "jinja2", "rich")
    run_python(f"import sys, {module}\nfound = [n for n in {heavy} if n in sys.modules]\nassert not found, found")


def test_no_file_is_longer_than_the_limit():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL_PYTHON}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a kernel by its decorator: @njit, @numba.njit(...), @intrinsic."""
    names = {node.id for each in function.decorator_list for node in ast.walk(each) if isinstance(node, ast.Name)}
    names |= {
        node.attr for each in function.decorator_list for node in ast.walk(each) if isinstance(node, ast.Attribute)
    }
    return bool(names & {"njit", "intrinsic"})


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    first = function.body[0]
    is_docstring = ast.get_docstring(function) is not None
    docstring_lines = first.end_lineno - first.lineno + 1 if is_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring_lines


def test_no_function_but_a_kernel_is_longer_than_the_limit():
    offenders = {}
    for path in ALL_PYTHON:
        if PACKAGE / "kernels" in path.parents:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_compiled(node):
                lines = lines_of_code(node)
                if lines > MAX_FUNCTION_LINES:
                    offenders[f"{name_of(path)}:{node.lineno} {node.name}"] = lines
    assert offenders == {}


def test_module_docstrings_are_short():
    lengths = {name_of(path): len((ast.get_docstring(tree_of(path)) or "").splitlines()) for path in ALL_PYTHON}
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_MODULE_DOCSTRING_LINES} == {}


def broad_handlers(path: Path) -> Iterator[ast.ExceptHandler]:
    """The handlers of a source that catch everything and do not raise it again."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = {each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)} if node.type else set()
            raises = any(isinstance(each, ast.Raise) for each in ast.walk(node))
            if (not caught or caught & {"Exception", "BaseException"}) and not raises:
                yield node


def test_only_the_boundaries_catch_everything():
    offenders = [
        f"{name_of(path)}:{handler.lineno}"
        for path in ALL_PYTHON
        if name_of(path) not in BOUNDARIES
        for handler in broad_handlers(path)
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ("handler", "is_broad"),
    [
        ("except:\n    pass", True),
        ("except Exception:\n    x = 1", True),
        ("except (OSError, BaseException) as e:\n    print(e)", True),
        ("except Exception:\n    clean()\n    raise", False),
        ("except OSError:\n    pass", False),
    ],
)
def test_the_handler_finder_sees_what_catches_everything(tmp_path, handler, is_broad):
    path = tmp_path / "a.py"
    path.write_text(f"try:\n    f()\n{handler}\n")
    assert bool(list(broad_handlers(path))) is is_broad


def test_only_the_command_line_reads_the_environment():
    offenders = []
    for path in SOURCES:
        if room_of(path) == "cli":
            continue
        for node in ast.walk(tree_of(path)):
            names = {node.attr} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names = {alias.name for alias in node.names}
            if names & {"environ", "environb", "getenv", "putenv"}:
                offenders.append(f"{name_of(path)}:{node.lineno}")
    assert offenders == []


def test_nothing_is_left_to_do_later():
    marks = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
    offenders = [
        f"{name_of(path)}:{number}"
        for path in ALL_PYTHON
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert offenders == []


def test_the_documents_name_only_files_that_exist():
    path_like = re.compile(r"`(\.?\w[\w.-]*(?:/[\w.-]+)+/?)`|([\w./-]*\w\.(?:py|md|toml))\b")
    missing = []
    for document in DOCUMENTS:
        for match in path_like.finditer(document.read_text(encoding="utf-8")):
            name = match[1] or match[2]
            places = (ROOT / name, PACKAGE / name, document.parent / name)
            if not any(place.exists() for place in places):
                missing.append(f"{name_of(document)}: {name}")
    assert missing == []


def test_the_readme_names_only_paths_that_the_server_has():
    sources = "".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "serve").glob("*.py"))
    routes = set(re.findall(r"router\.(?:get|post)\(\"([^\"]+)\"", sources))
    named = set(re.findall(r"`(/[\w/]+)`", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named
    assert named - routes == set()


def commands_in(document: Path) -> Iterator[list[str]]:
    """The words of every `millpond ...` and `make ...` of a document, inline or on a line of a code block."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?$(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        words = (
            shlex.split(line.strip().removeprefix("$ "), comments=True)
            if re.match(r"\s*(\$ )?(millpond|make) ", line)
            else []
        )
        if words:
            yield words


def unknown_words(words: list[str]) -> Iterator[str]:
    """What the command line does not know among the words of one `millpond ...`."""
    command = typer.main.get_command(make_app())
    for word in words[1:]:
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if word.startswith("--") and word.split("=")[0] not in known | {"--help"}:
            yield word
        elif not word.startswith("-") and getattr(command, "commands", None):
            if word not in command.commands:
                yield word
                return
            command = command.commands[word]


def test_the_documents_name_only_commands_and_flags_that_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    unknown = []
    for document in DOCUMENTS:
        for words in commands_in(document):
            if words[0] == "make":
                unknown += [word for word in words[1:] if "=" not in word and word not in targets]
            else:
                unknown += [f"{' '.join(words)}: {word}" for word in unknown_words(words)]
    assert unknown == []


def test_the_command_finder_sees_an_unknown_command_and_an_unknown_flag():
    assert list(unknown_words(["millpond", "serf"])) == ["serf"]
    assert list(unknown_words(["millpond", "serve", "smollm2", "--prot", "1"])) == ["--prot"]
    assert list(unknown_words(["millpond", "bench", "engine", "--json"])) == []
