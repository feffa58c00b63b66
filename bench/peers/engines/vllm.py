"""vLLM's CPU build, with the allocator and the OpenMP library that its log asks for loaded before it."""

from __future__ import annotations

from bench.peers.engines.base import KV_GIB, Engine, Settings
from bench.peers.sessions import ServerPlan, Session, WorkerSession
from bench.peers.site import MAX_NUM_SEQS, Site

VARIANTS: dict[str, Settings] = {
    "w8a8": {"model": "w8a8"},
    "bf16": {"model": "bf16"},
    "eager": {"model": "w8a8", "arguments": {"enforce_eager": True}},
    "budget_512": {"model": "w8a8", "arguments": {"max_num_batched_tokens": 512}},
}


def _preloads(site: Site) -> str:
    found = [*site.work.glob("preload/**/libtcmalloc_minimal.so.4"), site.environment("vllm") / "lib" / "libiomp5.so"]
    return ":".join(str(path) for path in found if path.exists())


def _environment(site: Site) -> dict[str, str]:
    return {
        "LD_PRELOAD": _preloads(site),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, site.cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _arguments(site: Site, settings: Settings, prefix_caching: bool) -> dict[str, object]:
    return {
        "max_model_len": site.max_model_len,
        "max_num_seqs": MAX_NUM_SEQS,
        "enable_prefix_caching": prefix_caching,
        **settings.get("arguments", {}),
    }


def _open(site: Site, name: str, settings: Settings, prefix_caching: bool) -> Session:
    told = {"model": str(site.models / settings["model"]), "arguments": _arguments(site, settings, prefix_caching)}
    # Stepped by hand, the engine has to live in the worker's own process.
    environment = {**_environment(site), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return WorkerSession.start(site, name, "vllm", told, environment)


def _flags(arguments: dict[str, object]) -> list[str]:
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _server(site: Site, settings: Settings, prefix_caching: bool) -> ServerPlan:
    model = str(site.models / settings["model"])
    # Its command `vllm` looks for a distribution of that name and ends: this one is called vllm-cpu.
    command = [site.python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", "{port}"]
    quiet = ["--disable-uvicorn-access-log"]
    return ServerPlan(
        [*command, *quiet, *_flags(_arguments(site, settings, prefix_caching))], _environment(site), model
    )


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    distribution="vllm-cpu",
    variants=VARIANTS,
    open_offline=_open,
    plan_server=_server,
    install_environment={},
    # They belong to images and sound, and the builds that the registry has do not go with this torch.
    remove=("torchvision", "torchaudio", "torchcodec"),
    probe="import vllm",
)
