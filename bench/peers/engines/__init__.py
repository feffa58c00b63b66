"""The engines that are compared, and the contenders that the command names: an engine, or engine:variant."""

from __future__ import annotations

from dataclasses import dataclass

from bench.peers.engines import llamacpp, millpond, openvino, vllm
from bench.peers.engines.base import Engine

ENGINES: dict[str, Engine] = {
    "millpond": millpond.ENGINE,
    "llamacpp": llamacpp.ENGINE,
    "openvino": openvino.ENGINE,
    "vllm": vllm.ENGINE,
}


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with one of its variants. name is what the command calls it: the engine alone for its first variant."""

    name: str
    engine: Engine
    variant: str


def parse_contenders(text: str) -> tuple[Contender, ...]:
    """Contenders from "millpond,openvino:q8_0". Raises ValueError, naming what there is, for one that is not known."""
    contenders: dict[str, Contender] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        engine_name, _, variant = name.partition(":")
        engine = ENGINES.get(engine_name)
        if engine is None:
            raise ValueError(f"no engine is called {engine_name!r}; there are {', '.join(ENGINES)}")
        if variant and variant not in engine.variants:
            raise ValueError(f"{engine_name} has no variant {variant!r}; it has {', '.join(engine.variants)}")
        contenders[name] = Contender(name, engine, variant or next(iter(engine.variants)))
    if not contenders:
        raise ValueError("no engine was named")
    return tuple(contenders.values())
