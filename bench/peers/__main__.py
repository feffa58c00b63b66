"""python -m bench.peers setup | run | resume | report: from the root of the repository."""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.peers import environments, report
from bench.peers.engines import ENGINES, Contender, parse_contenders
from bench.peers.picture import draw
from bench.peers.plan import GROUPS, Plan, quick
from bench.peers.quality import measure_quality
from bench.peers.runner import PHASES, Runner
from bench.peers.site import DEFAULT_WORK, ROOT, Site, read_json, write_json
from bench.peers.store import RunStore

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, help=__doc__)
console = Console(stderr=True, highlight=False)

WIDTH = 150  # of the table where nobody says how wide the page is
ALL_ENGINES = ",".join(ENGINES)
ALL_GROUPS = ",".join(GROUPS)
Work = Annotated[
    Path,
    typer.Option(
        "--work",
        help="Folder for environments, model variants and runs [default: bench/peers/.work]",
        show_default=False,
    ),
]
Model = Annotated[str, typer.Option("--model", help="The GGUF file that every variant is made from, or a known name.")]
Cores = Annotated[str, typer.Option("--cores", help="Cores that every engine is pinned to [default: the first two]")]
Engines = Annotated[str, typer.Option("--engines", metavar="NAME,NAME:VARIANT", help="Who takes part.")]


def fail(message: str) -> typer.Exit:
    console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(1)


def open_site(work: Path, model: str, cores: str) -> Site:
    """Where everything lies. Fetches the model where a name is not in the cache yet."""
    from millpond.load.gguf import open_gguf
    from millpond.load.store import resolve

    usable = sorted(os.sched_getaffinity(0))
    chosen = tuple(int(part) for part in cores.split(",")) if cores else tuple(usable[:2])
    if not set(chosen) <= set(usable):
        raise fail(f"cores {cores} are not all among the usable ones: {','.join(map(str, usable))}")
    path = resolve(model)
    metadata = open_gguf(path).metadata
    architecture = metadata["general.architecture"]
    return Site(
        work.resolve(),
        path.resolve(),
        chosen,
        len(metadata["tokenizer.ggml.tokens"]),
        metadata[f"{architecture}.context_length"],
    )


def chosen_contenders(engines: str) -> tuple[Contender, ...]:
    try:
        return parse_contenders(engines)
    except ValueError as error:
        raise fail(str(error)) from None


@app.command()
def setup(
    work: Work = DEFAULT_WORK,
    model: Model = "smollm2",
    cores: Cores = "",
    engines: Engines = ALL_ENGINES,
    again: Annotated[bool, typer.Option("--again", help="Look again at engines that are set up already.")] = False,
) -> None:
    """Install each engine into an environment of its own and make the model's variants. Takes a while once."""
    site = open_site(work, model, cores)
    names = list(dict.fromkeys([environments.REFERENCE, *(each.engine.name for each in chosen_contenders(engines))]))
    for name in names:
        if not again and not environments.missing(site, [name]):
            console.print(f"{name}: is set up")
            continue
        console.print(f"{name}: setting up, log in {site.log(f'{name}-setup')}", soft_wrap=True)
        with console.status(f"{name}: setting up"):
            if name == environments.REFERENCE:
                record = environments.set_up_reference(site)
            else:
                record = environments.set_up_engine(site, ENGINES[name])
        environments.record_setup(site, name, record)
        console.print(f"{name}: {setup_outcome(record)}", markup=False, soft_wrap=True)
    failed = environments.missing(site, names)
    if failed:
        raise fail(f"not set up: {', '.join(failed)}")


def setup_outcome(record: dict[str, Any]) -> str:
    if not record["ok"]:
        return f"failed: {record['error']}"
    size = f", {record['bytes'] / 1e6:.0f} MB" if "bytes" in record else ""
    extra = f"; {record['preload']}" if "preload" in record else ""
    return f"{record.get('version', 'ready')} in {record['seconds']:.0f} s{size}{extra}"


@app.command()
def run(
    work: Work = DEFAULT_WORK,
    model: Model = "smollm2",
    cores: Cores = "",
    engines: Engines = ALL_ENGINES,
    only: Annotated[str, typer.Option("--only", metavar="NAME,NAME", help=f"Of {', '.join(GROUPS)}.")] = ALL_GROUPS,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that count.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Key of all prompts and arrivals.")] = 0,
    quick_: Annotated[
        bool, typer.Option("--quick", help="One short round of everything, whatever --rounds says.")
    ] = False,
    name: Annotated[str, typer.Option("--name", help="Name of the run [default: the time]")] = "",
) -> None:
    """Measure the engines beside one another, print the table, write the picture and the record."""
    site = open_site(work, model, cores)
    contenders = chosen_contenders(engines)
    try:
        plan = Plan(
            contenders=tuple(each.name for each in contenders),
            groups=tuple(part.strip() for part in only.split(",") if part.strip()),
            rounds=rounds,
            seed=seed,
        )
    except ValueError as error:
        raise fail(str(error)) from None
    store = RunStore(site.work / "runs" / (name or time.strftime("%Y%m%d-%H%M%S")))
    try:
        store.create(quick(plan) if quick_ else plan, facts(site, contenders))
    except FileExistsError:
        raise fail(f"there is a run of that name; go on with it: python -m bench.peers resume {name}") from None
    carry_out(site, store)


@app.command()
def resume(
    name: Annotated[str, typer.Argument(help="Name of the run.")],
    work: Work = DEFAULT_WORK,
    noisy: Annotated[
        bool, typer.Option("--noisy", help="Measure again what others disturbed, the rows marked with *.")
    ] = False,
) -> None:
    """Go on with a run that was interrupted, or try again what failed in it."""
    store = open_run(work, name)
    known = store.header()["facts"]
    carry_out(
        open_site(work, known["model"], ",".join(map(str, known["cores"]))), store, report.NOISY if noisy else 1.0
    )


@app.command("report")
def report_(
    name: Annotated[str, typer.Argument(help="Name of the run [default: the latest]")] = "", work: Work = DEFAULT_WORK
) -> None:
    """Print a run's table again and write its picture."""
    if not name:
        folders = sorted((work / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
        if not folders:
            raise fail(f"there is no run in {work / 'runs'}")
        name = folders[-1].parent.name
    show(open_run(work, name))


def open_run(work: Path, name: str) -> RunStore:
    store = RunStore(work.resolve() / "runs" / name)
    try:
        store.header()
    except FileNotFoundError as error:
        raise fail(str(error)) from None
    return store


def carry_out(site: Site, store: RunStore, most_noise: float = 1.0) -> None:
    """Run what is left of the plan, then show everything. An engine that is not set up is recorded as failed."""
    plan = store.plan()
    wanted = {each.name: each for each in chosen_contenders(",".join(plan.contenders))}
    reasons = environments.missing(site, [each.engine.name for each in wanted.values()])
    for engine, reason in reasons.items():
        console.print(f"{engine} takes no part: {reason} (python -m bench.peers setup)", style="red", markup=False)
    ready = {name: each for name, each in wanted.items() if each.engine.name not in reasons}
    if not ready:
        raise fail("no engine is set up: python -m bench.peers setup")
    record_sizes(site, store, ready)
    for signal_ in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_, interrupt)  # the engines are in sessions of their own and would live on
    try:
        measure_all(site, store, plan, ready, most_noise)
    except KeyboardInterrupt:
        console.print(f"interrupted; go on with it: python -m bench.peers resume {store.folder.name}", soft_wrap=True)
        raise typer.Exit(130) from None
    for engine, reason in reasons.items():
        store.add({"key": "install/bytes", "contender": engine, "round": 1, "error": reason})
    show(store)


def measure_all(site: Site, store: RunStore, plan: Plan, ready: dict[str, Contender], most_noise: float) -> None:
    """What is left of the plan, under a progress bar."""
    with progress() as (bar, task):
        tell = partial(bar.console.print, soft_wrap=True)
        runner = Runner(site, plan, store, ready, tell, lambda: bar.advance(task), most_noise)
        bar.update(task, total=sum(1 for phase in PHASES for _ in runner.pending(phase)))
        runner.run()
        if "quality" in plan.groups:
            measure_quality(site, store, {each.engine.name for each in ready.values()}, tell)


def interrupt(signal_: int, frame: object) -> None:
    """End in good order, however the command is ended."""
    raise KeyboardInterrupt


@contextmanager
def progress() -> Iterator[tuple[Progress, Any]]:
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        yield bar, bar.add_task("", total=None)


def record_sizes(site: Site, store: RunStore, contenders: dict[str, Contender]) -> None:
    done, setups = store.done(), read_json(site.setup_file)
    for name, contender in contenders.items():
        if ("install/bytes", name, 1) not in done:
            sample = {"bytes": setups[contender.engine.name]["bytes"]}
            store.add({"key": "install/bytes", "contender": name, "round": 1, "sample": sample})


def facts(site: Site, contenders: tuple[Contender, ...]) -> dict[str, Any]:
    """What a reader of the figures has to know: machine, commit, versions, settings, the command."""
    info = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    setups = read_json(site.setup_file)
    return {
        "began": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(["python", "-m", "bench.peers", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "processor": models[0] if models else platform.processor(),
        "cores": list(site.cores),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": platform.platform(),
        "python": platform.python_version(),
        "model": str(site.model),
        "settings": {each.name: dict(each.engine.variants[each.variant]) for each in contenders},
        "versions": {name: record.get("version") for name, record in setups.items() if record["ok"]},
    }


def show(store: RunStore) -> None:
    """The table on standard output; report.json and picture.png into the run's folder."""
    header, records = store.header(), list(store.records())
    some, names = report.rows(records), report.names_of(records)
    known = header["facts"]
    output = Console()
    if not output.is_terminal:
        output = Console(width=WIDTH)
    output.print(report.table(some, names))
    print("Medians; ± is half of the spread between rounds. To the best peer: above 1 millpond is ahead.")
    print(f"* others took more than {report.NOISY:.0%} of the cores in some round.")
    for reason in report.absences(records):
        print(f"- {reason}")
    for (key, name), error in report.failures(records).items():
        console.print(f"failed: {key}, {name}: {error}", style="red", markup=False)
    write_json(store.folder / "report.json", {**header, "rows": [row.as_json() for row in some], "records": records})
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items() if version)
    title = f"{versions}; {known['processor']}, {len(known['cores'])} cores; {known['began']}, commit {known['commit']}"
    draw(some, names, title, store.folder / "picture.png")
    print(f"{store.folder / 'report.json'}\n{store.folder / 'picture.png'}")


if __name__ == "__main__":
    app()
