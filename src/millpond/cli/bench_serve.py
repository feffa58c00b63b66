"""`millpond bench serve`: a load against any OpenAI-compatible server, and what it makes of it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli import traffic
from millpond.cli.options import MOST_COUNT, Plot, check_target, examples
from millpond.cli.settings import Settings
from millpond.cli.simulate import span

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.http_client import Server
    from millpond.lab.load_dialect import Dialect
    from millpond.lab.load_plan import LoadPlan
    from millpond.lab.load_test import LoadRun
    from millpond.lab.workload import WorkloadRequest

HELP = (
    """Load a server that speaks the OpenAI API, this one or another, and measure what its clients see.

Requests come by the clock (--rate), whether or not earlier ones are done, and every latency counts from when a request
was due; or so many at a time (--concurrency), the next when one is done, so that a slow server has less to do. Each
has a connection of its own, greedy and streamed. ITL is from one piece of text to the next.

Prompts are random token ids where the server takes them, else words that make about as many tokens, as two requests
before the load have shown. Tokens are counted by the server's usage, or as pieces of text where it sends none; the
report says which.

"""
    + f"{traffic.LENGTHS_HELP} {traffic.TRACE_HELP}"
)

EXAMPLES = examples(
    "millpond bench serve --url http://127.0.0.1:8000 --rate 2 --requests 60",
    "millpond bench serve --url http://127.0.0.1:8000 --concurrency 16 --shared-prefix 512 --prefix-groups 4",
    "millpond bench serve --url https://host/v1 --model m --endpoint chat --ttft-slo 1 --itl-slo 0.1 --plot load.png",
    "millpond bench serve --url http://127.0.0.1:8000 --trace requests.jsonl --save records.jsonl --json",
)

LATENCIES = {"ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "time per output token", "e2e_s": "end to end"}
MOST_FILES = 1 << 16
RANKS = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}


Url = Annotated[str, typer.Option("--url", help="Of the server, with or without /v1.")]
Model = Annotated[str | None, typer.Option("--model", help="[default: the first of /v1/models]")]
Endpoint = Annotated[
    str,
    typer.Option("--endpoint", metavar="completions|chat", help="Which route the requests take."),
]
Prompts = Annotated[
    str,
    typer.Option(
        "--prompts",
        metavar="auto|ids|text",
        help="Token ids, text of about that length, or what the server takes.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", min=1, max=MOST_COUNT, help="So many requests at a time, in place of a rate."),
]
SharedPrefix = Annotated[
    int,
    typer.Option(
        "--shared-prefix", min=0, max=MOST_COUNT, metavar="N", help="Tokens in front of each prompt, beside its own."
    ),
]
PrefixGroups = Annotated[
    int, typer.Option("--prefix-groups", min=1, metavar="N", help="How many different prefixes are shared.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Ask for outputs of exactly their length, where the server can.")
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="S", help="For each request.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="[default: OPENAI_API_KEY, or none]")]
Header = Annotated[
    list[str] | None, typer.Option("--header", metavar="'NAME: VALUE'", help="With every request; may be repeated.")
]
Save = Annotated[
    Path | None,
    typer.Option("--save", metavar="FILE", callback=check_target, help="Write a line for each request (JSONL)."),
]


def register(group: typer.Typer) -> None:
    group.command("serve", help=HELP, epilog=EXAMPLES)(serve)


def parse_headers(lines: Iterable[str]) -> dict[str, str]:
    """{"Name": "value"} from "Name: value"."""
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise typer.BadParameter(f"{line[:40]!r} is not a header (say 'Name: value')", param_hint="'--header'")
        headers[name.strip()] = value.strip()
    return headers


def server_of(context: typer.Context, url: str, api_key: str | None, headers: Iterable[str]) -> Server:
    """With the key of --api-key or of the environment; a header of the user's wins."""
    from millpond.lab.http_client import Server

    key = api_key or context.ensure_object(Settings).openai_api_key
    authorization = {} if key is None else {"Authorization": f"Bearer {key}"}
    return Server.at(url, authorization | parse_headers(headers))


def raise_file_limit() -> None:
    """A connection is an open file, and the first limit on them is often 1024: take what the system allows at most."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def refuse_rate(context: typer.Context) -> None:
    """Raises BadParameter where a closed loop is given a rate."""
    given = [f"--{name}" for name in ("rate", "burstiness") if traffic.is_given(context, name)]
    if given:
        raise typer.BadParameter(
            f"requests that wait for others have no rate: leave out {', '.join(given)}", param_hint="'--concurrency'"
        )


def described(dialect: Dialect) -> dict[str, Any]:
    """How the requests were written, in place of what was asked for."""
    return {
        "model": dialect.model,
        "prompts": "token ids" if dialect.takes_ids else "text",
        "tokens_per_word": None if dialect.takes_ids else dialect.tokens_per_word,
    }


async def run_against(server: Server, workload: Sequence[WorkloadRequest], plan: LoadPlan) -> tuple[Dialect, LoadRun]:
    """Find out what the server understands, write the requests, and send them under a progress bar."""
    from millpond.cli.progress import advancing_bar
    from millpond.lab.load_client import LoadClient
    from millpond.lab.load_dialect import find_dialect
    from millpond.lab.load_test import run_load, write_requests

    dialect = await find_dialect(server, plan)
    requests = write_requests(workload, dialect, plan)
    with advancing_bar(len(requests), "requests") as notify:
        client = LoadClient(server, plan.route, plan.timeout)
        return dialect, await run_load(client, requests, concurrency=plan.concurrency, notify=notify)


def as_table(report: Mapping[str, Any]) -> Table:
    """A row for each latency, counted from when a request was due, and for two of them from when it was sent."""
    from rich import box
    from rich.table import Table

    table = Table("", *RANKS.values(), box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {label: report[name] for name, label in LATENCIES.items()}
    if report["concurrency"] is None:
        sent = report["from_send_s"]
        rows |= {"TTFT, from send": sent["ttft"], "end to end, from send": sent["e2e"]}
    for label, found in rows.items():
        if found:
            table.add_row(label, *(span(found[rank]) for rank in RANKS))
    return table


def summary(report: Mapping[str, Any]) -> list[str]:
    """What stands under the table: throughput, tokens and who counted them, goodput, errors, and the client itself."""
    client, prompts, outputs = report["client"], report["prompt_tokens"], report["output_tokens"]
    lines = [
        f"{report['completed']} of {report['requests']} requests in {span(report['seconds'])}: "
        f"{report['requests_s']:,.2f} requests/s, {report['output_tok_s']:,.1f} output tok/s, "
        f"{report['total_tok_s']:,.1f} with prompts; at the most {client['most_in_flight']} under way",
    ]
    if report["completed"]:
        lines += [
            f"prompts are {report['prompts']}: {prompts['counted']:,} tokens where {prompts['asked']:,} were asked "
            f"for, {counted_by(prompts, 'what was asked for')}",
            f"outputs: {outputs['counted']:,} tokens of at most {outputs['asked']:,}, in {outputs['pieces']:,} pieces "
            f"of text, {counted_by(outputs, 'pieces of text')}",
        ]
    if (found := report["goodput"]) is not None:
        lines.append(f"goodput: {found['requests_s']:,.2f} requests/s, {found['share']:.1%} of all")
    lines += [error_line(each) for each in report["errors"]]
    lines.append(
        f"client: {client['cpu_share']:.1%} of a core; requests left {span(client['lag_s']['mean'])} late on average, "
        f"p99 {span(client['lag_s']['p99'])}"
        + (f"; connecting took {span(client['connect_s']['mean'])}" if client["connect_s"] else "")
    )
    return lines


def counted_by(found: Mapping[str, Any], otherwise: str) -> str:
    missing = found["requests_without_usage"]
    return "by the server's usage" if not missing else f"of {missing} requests without usage as {otherwise}"


def error_line(found: Mapping[str, Any]) -> str:
    after = f", Retry-After {', '.join(found['retry_after'][:8])}" if found["retry_after"] else ""
    return f"error {found['kind']}: {found['count']}{after}; the first: {found['message']}"


def warnings(report: Mapping[str, Any]) -> list[str]:
    """Where the client may be what was measured."""
    client, found = report["client"], []
    if client["is_late"]:
        found.append(
            f"warning: the client was behind its own schedule (p99 {span(client['lag_s']['p99'])}), which is in the "
            f"latencies but not in those from send: take a lower rate or another machine"
        )
    if client["is_busy"]:
        found.append(
            f"warning: the client took {client['cpu_share']:.0%} of a core and may be what was measured: "
            f"take another machine or a smaller load"
        )
    return found


def serve(
    context: typer.Context,
    url: Url,
    model: Model = None,
    endpoint: Endpoint = "completions",
    prompts: Prompts = "auto",
    requests: traffic.Requests = 100,
    rate: traffic.Rate = 2.0,
    burstiness: traffic.Burstiness = 1.0,
    concurrency: Concurrency = None,
    prompt_tokens: traffic.PromptTokens = traffic.PROMPT_TOKENS,
    max_tokens: traffic.MaxTokens = traffic.MAX_TOKENS,
    shared_prefix: SharedPrefix = 0,
    prefix_groups: PrefixGroups = 1,
    seed: traffic.Seed = 0,
    trace: traffic.Trace = None,
    ignore_eos: IgnoreEos = False,
    timeout: Timeout = 600.0,
    api_key: ApiKey = None,
    header: Header = None,
    ttft_slo: traffic.TtftSlo = None,
    itl_slo: traffic.ItlSlo = None,
    save: Save = None,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    from millpond.lab.load_plan import LoadPlan
    from millpond.lab.load_report import figures

    slo = traffic.slo_of(ttft_slo, itl_slo)
    server = server_of(context, url, api_key, header or ())
    plan = LoadPlan(**{each.name: context.params[each.name] for each in fields(LoadPlan)})
    workload = (
        traffic.drawn_workload(requests, prompt_tokens, max_tokens, seed, rate=rate, burstiness=burstiness)
        if trace is None
        else traffic.traced_workload(context, trace, but=("seed",))
    )
    if concurrency is not None:
        refuse_rate(context)
    raise_file_limit()
    dialect, run = asyncio.run(run_against(server, workload, plan))
    arrivals: dict[str, Any] = {"rate": rate if rate < math.inf else "inf", "burstiness": burstiness}
    if trace is not None or concurrency is not None:
        arrivals = {"trace": trace and str(trace)}
    report = {"url": url, **arrivals, **asdict(plan), **described(dialect), **figures(run, slo)}
    show(run, report, as_json, save, plot)


def show(run: LoadRun, report: Mapping[str, Any], as_json: bool, save: Path | None, plot: Path | None) -> None:
    if save is not None:
        save.write_text("".join(f"{json.dumps(each.as_json())}\n" for each in run.records), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(report))
    else:
        from rich.console import Console

        if report["completed"]:
            Console().print(as_table(report))
        for line in summary(report):
            typer.echo(line)
    for line in warnings(report):
        typer.echo(line, err=True)
    if plot is not None:
        from millpond.lab.load_plot import draw

        draw(run, report, plot)
