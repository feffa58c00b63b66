"""What the harness knows of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.peers.sessions import ServerPlan, Session
from bench.peers.site import Site

KV_GIB = 1  # room for keys and values, in every engine that can be told
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine: its settings by variant, the best known first, and how it is started offline and as a server.

    open_offline takes (site, name, settings, prefix_caching); plan_server (site, settings, prefix_caching), and is None
    where the engine's package has no server. install_environment is for pip where the package is compiled here: in it
    {jobs} stands for the number of cores, {engines} for this folder. remove names packages that its requirements drag
    in and that keep it from starting.
    """

    name: str
    title: str
    distribution: str
    variants: Mapping[str, Settings]
    open_offline: Callable[[Site, str, Settings, bool], Session]
    plan_server: Callable[[Site, Settings, bool], ServerPlan] | None
    install_environment: Mapping[str, str]
    remove: tuple[str, ...] = ()
    probe: str = ""
