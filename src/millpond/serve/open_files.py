"""A connection is an open file, and the limit on those is often lower than what a server needs."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

ENOUGH = 4096  # a thousand connections, those that close and those that come meanwhile


def raise_open_files() -> int:
    """Raise this process's limit to the highest that it may; returns it, and logs where that is not much."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and most < ENOUGH:
        logger.warning("this process may have %d open files, so fewer connections than that (see ulimit -n)", most)
    return most
