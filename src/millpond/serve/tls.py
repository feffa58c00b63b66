"""Certificates, checked before anything else is done."""

from __future__ import annotations

import ssl
from pathlib import Path

from millpond.errors import ConfigError


def check_certificate(cert: Path, key: Path | None) -> None:
    """Raise ConfigError where a certificate and its key cannot serve: missing, unreadable, not of one pair, locked."""
    for path in (cert, *([key] if key else [])):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password(key or cert))
    except ssl.SSLError as error:
        both = f"{cert} and {key}" if key else f"{cert} (which must hold the key too, or give --tls-key)"
        raise ConfigError(f"{both} are no certificate and key of one pair: {error.reason or error}") from error


class _no_password:
    """Without it a locked key would ask whoever sits at the terminal, and a service would wait for ever."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self) -> str:
        raise ConfigError(f"the key in {self._path} is locked with a password; give one that is not")
