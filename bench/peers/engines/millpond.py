"""millpond itself, installed from the working tree into an environment of its own."""

from __future__ import annotations

from bench.peers.engines.base import KV_GIB, Engine, Settings
from bench.peers.sessions import ServerPlan, Session, WorkerSession
from bench.peers.site import MAX_NUM_SEQS, Site

VARIANTS: dict[str, Settings] = {
    "default": {},
    "kv_int8": {"kv_dtype": "int8"},
    "budget_2048": {"max_num_batched_tokens": 2048},
}


def _open(site: Site, name: str, settings: Settings, prefix_caching: bool) -> Session:
    config = {"max_num_seqs": MAX_NUM_SEQS, "kv_memory": KV_GIB << 30, "threads": len(site.cores), **settings}
    config["prefix_cache"] = prefix_caching
    return WorkerSession.start(site, name, "millpond", {"model": str(site.model), "config": config}, {})


def _server(site: Site, settings: Settings, prefix_caching: bool) -> ServerPlan:
    options = {"max_num_seqs": MAX_NUM_SEQS, "kv_memory": f"{KV_GIB}G", "threads": len(site.cores), **settings}
    caching = "--prefix-cache" if prefix_caching else "--no-prefix-cache"
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [str(site.environment("millpond") / "bin" / "millpond"), "serve", str(site.model), "--port", "{port}"]
    command += ["--served-model-name", str(site.model)]
    return ServerPlan([*command, "--log-level", "warning", caching, *flags], {}, str(site.model))


ENGINE = Engine(
    name="millpond",
    title="millpond",
    distribution="millpond",
    variants=VARIANTS,
    open_offline=_open,
    plan_server=_server,
    install_environment={},
    probe="import millpond.build",
)
