"""Whose request it is, where that counts: with --policy fair.

An API key that the server knows wins over what the body says, which anybody may write, and that over the header, which
a proxy may add. Who says nothing shares one tenant with all others that say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from millpond.errors import ConfigError, InvalidRequestError, shown

TENANT_HEADER = "X-Millpond-Tenant"
SANE_TENANT = re.compile(r"[!-~]{1,200}")
KEY_TENANT = re.compile(r"key([1-9][0-9]{0,8})")
OPEN_TENANT = re.compile(rf"user:.+|header:{SANE_TENANT.pattern}", re.DOTALL)

# Of the request that is being handled: the number of its API key, from 1 on, 0 without; and what the header says.
API_KEY: ContextVar[int] = ContextVar("api_key", default=0)
HEADER: ContextVar[tuple[str, ...]] = ContextVar("tenant_header", default=())


class TenantHeader:
    """ASGI middleware that keeps the header for tenant_of()."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = TENANT_HEADER.lower().encode()
            HEADER.set(tuple(value.decode("latin-1") for key, value in scope["headers"] if key == name))
        await self.app(scope, receive, send)


def check_tenants(tenants: Iterable[str], num_keys: int) -> None:
    """Raise ConfigError for the first that is the tenant of no request, where a server has so many API keys."""
    for tenant in tenants:
        number = KEY_TENANT.fullmatch(tenant)
        if num_keys:
            if number is None or int(number[1]) > num_keys:
                all_keys = "key1" if num_keys == 1 else f"key1 to key{num_keys}"
                raise ConfigError(
                    f"tenant_weights names {shown(tenant)}, which is nobody: who asks is {all_keys}, "
                    f"for there are {num_keys} API keys"
                )
        elif number is not None:
            raise ConfigError(
                f"tenant_weights names {shown(tenant)}, which is nobody without API keys: give some (api_key)"
            )
        elif tenant and not OPEN_TENANT.fullmatch(tenant):
            raise ConfigError(
                f"tenant_weights names {shown(tenant)}, which is nobody: without API keys, who asks is user:NAME, "
                "header:NAME, or nothing where it says nothing"
            )


def tenant_of(user: str | None) -> str:
    """key1, user:NAME, header:NAME or nothing. Raises InvalidRequestError for a header that counts and is no name."""
    if number := API_KEY.get():
        return f"key{number}"
    if user:
        return f"user:{user}"
    given = HEADER.get()
    if not given:
        return ""
    if len(given) != 1 or not SANE_TENANT.fullmatch(given[0]):
        raise InvalidRequestError(
            f"{TENANT_HEADER} must be one name of 1 to 200 visible ASCII characters, got {shown(', '.join(given))}",
            TENANT_HEADER,
        )
    return f"header:{given[0]}"
