"""The command ``arena``: ``python -m minisgl.lab arena policy FILE…``."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path

from minisgl.chapters.lab.arena.match import REFERENCE, SCORED, draw_match, match, table
from minisgl.chapters.lab.arena.traces import KINDS, traces_of
from minisgl.chapters.lab.folder import Folder
from minisgl.config import ConfigError

__all__ = ["add_arena", "run_arena"]


def add_arena(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command. ``add(name, text, lab=False)`` returns the parser of a new command."""
    parser = add("arena", "let policies or caches play against each other, and against the shipped ones", lab=False)
    parser.add_argument("kind", choices=list(KINDS), help="what plays")
    parser.add_argument("files", nargs="*", metavar="FILE", help="a plugin file; none: only the shipped plugins play")
    parser.add_argument("--seed", type=int, help="repeat the traces of an earlier match")
    parser.add_argument("--plot", metavar="FILE", help="write the picture here (default: arena_KIND.svg)")


def run_arena(folder: Folder, options: argparse.Namespace) -> int:
    """Run the command. Return 0 if every file has a score, else 1."""
    for file in options.files:
        if not Path(file).exists():
            raise ConfigError(f"{file}: there is no such file.")
    kind = options.kind
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"{kind}, hidden traces of seed {seed}:")
    for trace in traces_of(kind, seed):
        print(f"  {trace.name:<10} {trace.says}")
    entries = []
    for entry in match(kind, options.files, seed):
        said = f"out: {entry.out}" if entry.out else f"{entry.score:.3f}"
        print(f"  played: {entry.name:<24} {said}", flush=True)
        entries.append(entry)
    print(f"\n{table(kind, entries)}\n\nScore: {SCORED[kind][1]}. Relative to {REFERENCE[kind]}, lower is better.")
    plot = Path(options.plot) if options.plot else folder.path / f"arena_{kind}.svg"
    plot.write_text(draw_match(kind, entries, seed), "utf-8")
    print(f"wrote {plot}")
    return int(any(entry.own and math.isinf(entry.score) for entry in entries))
