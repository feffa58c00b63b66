"""OpenVINO GenAI: its continuous-batching pipeline reads the GGUF file itself. Its package has no server."""

from __future__ import annotations

from bench.peers.engines.base import KV_GIB, Engine, Settings
from bench.peers.sessions import Session, WorkerSession
from bench.peers.site import MAX_NUM_SEQS, Site

VARIANTS: dict[str, Settings] = {
    "q4_0": {"model": "q4_0.gguf"},
    "q4_1": {"model": ""},  # the file that everything is made from
    "q8_0": {"model": "q8_0.gguf"},
    "kv_bf16": {"model": "q4_0.gguf", "properties": {"KV_CACHE_PRECISION": "bf16"}},
    "f32": {"model": "q4_0.gguf", "properties": {"INFERENCE_PRECISION_HINT": "f32"}},
    "budget_2048": {"model": "q4_0.gguf", "scheduler": {"max_num_batched_tokens": 2048}},
}


def _open(site: Site, name: str, settings: Settings, prefix_caching: bool) -> Session:
    scheduler = {
        "cache_size": KV_GIB,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 512,
        "dynamic_split_fuse": True,
        "enable_prefix_caching": prefix_caching,
        **settings.get("scheduler", {}),
    }
    properties = {
        "INFERENCE_NUM_THREADS": len(site.cores),
        "ENABLE_CPU_PINNING": True,
        "PERFORMANCE_HINT": "LATENCY",
        **settings.get("properties", {}),
    }
    model = site.models / settings["model"] if settings["model"] else site.model
    told = {"model": str(model), "scheduler": scheduler, "properties": properties}
    return WorkerSession.start(site, name, "openvino", told, {})


ENGINE = Engine(
    name="openvino",
    title="OpenVINO GenAI",
    distribution="openvino-genai",
    variants=VARIANTS,
    open_offline=_open,
    plan_server=None,
    install_environment={},
    probe="import openvino_genai",
)
