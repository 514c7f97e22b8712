"""What the benchmarks' command lines share: words `key=value` wherever they stand, and files for the results.

Knows argparse, and neither options nor benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Let the parser take words ``key=value``; read them with `parse`."""
    parser.add_argument("options", nargs="*", metavar="key=value", help=f"minisgl's options, {what}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json FILE``."""
    parser.add_argument("--json", type=writable, metavar="FILE", help="write everything that was measured")


def write_json(args: argparse.Namespace, report: Mapping[str, Any]) -> None:
    """Write ``report`` where ``--json`` says, if it does."""
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, the words ``key=value`` among ``options``. They are taken out first: a flag that takes several
    values, as ``--only`` does, would take them too. A flag's own value that has a ``=`` is written ``--flag=value``."""
    words = [word for word in argv if "=" in word and not word.startswith("-")]
    args = parser.parse_intermixed_args([word for word in argv if word not in words])
    args.options = [*words, *args.options]
    return args


def writable(text: str) -> Path:
    """The type of an argument that names a file to write: says before anything is measured that it can't be."""
    path = Path(text)
    folder = path.parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{path} can't be written: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} can't be written: no permission")
    return path
