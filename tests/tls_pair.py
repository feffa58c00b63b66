"""A certificate for 127.0.0.1 and its key, made for a test."""

from __future__ import annotations

from pathlib import Path

import trustme


def certificate_in(folder: Path) -> tuple[Path, Path]:
    """The files of a certificate and of its key; whoever trusts `ca.pem` beside them trusts it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    return cert, key
