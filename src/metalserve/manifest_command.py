"""`metalserve manifest DIR`: the SHA-256 manifest of a model's directory, as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from metalserve.errors import MetalserveError
from metalserve.remote.weights_manifest import WeightsError, make_manifest


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "manifest",
        help="hash a model's directory",
        description="Print the manifest that pins a model's files by SHA-256.",
    )
    parser.add_argument("directory", type=Path, help="the directory that holds config.json and the weights")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the manifest."""
    if not options.directory.is_dir():
        raise MetalserveError(f"{options.directory} is not a directory. Needed: the directory of a model.")
    try:
        files = make_manifest(options.directory)
    except WeightsError as error:
        raise MetalserveError(str(error)) from error
    print(json.dumps({"schema": 1, "files": files}, indent=1))
    return 0
