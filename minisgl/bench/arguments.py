"""Shared parts of the benchmarks' command lines: options `key=value` at any position, and files for the results."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser, scope: str) -> None:
    """Let the parser accept options ``key=value``, which `parse` reads. ``scope`` is a phrase for the help text."""
    parser.add_argument("options", nargs="*", metavar="key=value", help=f"minisgl's options, {scope}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--json FILE``."""
    parser.add_argument("--json", type=writable, metavar="FILE", help="write all results as JSON")


def write_json(args: argparse.Namespace, report: Mapping[str, Any]) -> None:
    """Write ``report`` to the file of ``--json``, if the argument was given."""
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments, with the words ``key=value`` in ``options``.

    These words are removed before the other arguments are parsed, because a flag with several values, like ``--only``,
    would consume them. A value of a flag that contains ``=`` must be written ``--flag=value``.
    """
    words = [word for word in argv if "=" in word and not word.startswith("-")]
    args = parser.parse_intermixed_args([word for word in argv if word not in words])
    args.options = [*words, *args.options]
    return args


def writable(text: str) -> Path:
    """Return the path of a file to write: a ``type`` for argparse.

    Raises ``ArgumentTypeError`` if the file cannot be written, before the benchmark runs.
    """
    path = Path(text)
    folder = path.parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: no permission")
    return path
