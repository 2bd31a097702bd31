"""`metalserve key NAME`: a new API key, and the entry that lets it in."""

from __future__ import annotations

import argparse
import hashlib
import secrets
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "key",
        help="make an API key for a client of the gateway",
        description="Print a new API key on standard output and its entry for gateway_clients on standard error. "
        "The key is kept nowhere: the gateway knows its SHA-256 only.",
    )
    parser.add_argument("name", help="the client's name, as the access log and the limits know it")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the key and the entry."""
    # 256 random bits need no salt and no slow hash: nobody can try them all.
    key = "sk-" + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    print(f"gateway_clients:\n  - name: {options.name}\n    key_sha256: {digest}", file=sys.stderr)
    print(key)
    return 0
