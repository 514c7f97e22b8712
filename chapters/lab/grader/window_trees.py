"""Trees of pages with gaps, for lab `window`: random ones, and the check of a match by trying every length.

A workload has ``windows``, ``page_size`` and::

    "prompts": [[space, tokens, missing], …]   cached prompts; missing: [page, group], … that the cache does not have
    "locked": [[prompt, pages], …]             the first pages of a prompt are in use, in all groups
    "asks": [[space, tokens], …]               the keys to match

Knows the base class of the student's cache, and not the student's code.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from minisgl.chapters.lab.grader.gate import Broken, Invalid, amount
from minisgl.core import EngineSpec
from minisgl.plugins.cache.base import Key
from minisgl.plugins.cache.grouped.tree import ABSENT, Node, Path

__all__ = ["Tree", "make_tree", "show_tree", "why_length"]

SPACES = (None, "a")
PROMISE = "`match` returns the longest prefix that is valid in all groups."
ALL = 2**31 - 1
MISTAKES = ("stops", "whole", "beginning", "one-more", "full-only", "windows-only", "one-less", "namespace")
"""Mistakes that lead to matches of a wrong length."""


def make_tree(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random tree, and keys that share any part of its prompts."""
    page = rng.choice([1, 1, 2, 3])
    windows = rng.choice(
        [[-1, 2 * page + 1], [-1, 3 * page], [-1, 1], [4 * page], [-1, page + 1, 4 * page], [-1, -1], [3, 9]]
    )
    prompts: list[list[Any]] = []
    for _ in range(rng.randint(1, 1 + min(size // 4, 3))):
        base = rng.choice(prompts)[1] if prompts and rng.random() < 0.7 else []
        base = base[: rng.randint(0, len(base))]
        ids = [*base, *(rng.randint(0, 1) for _ in range(page * rng.randint(1, 3 + min(size, 7))))]
        missing: list[list[int]] = []
        for number, window in enumerate(windows):
            pages = len(ids) // page
            share = rng.choice([0.0, 0.0, 0.1] if window < 0 else [0.0, 0.2, 0.5])
            gone = rng.randint(0, pages) if window >= 0 and rng.random() < 0.5 else 0
            missing += [[at, number] for at in range(pages) if at < gone or rng.random() < share]
        prompts.append([rng.choice([0, 0, 0, 1]), ids, missing])
    locked = [[i, rng.randint(0, len(ids) // page)] for i, (_, ids, _) in enumerate(prompts) if rng.random() < 0.5]
    asks = []
    for _ in range(4):
        space, ids, _ = rng.choice(prompts)
        cut = rng.choice([len(ids), rng.randint(0, len(ids))])
        more = [rng.randint(0, 1) for _ in range(rng.choice([0, 0, page, 2 * page]))]
        asks.append([space if rng.random() < 0.9 else 1 - space, [*ids[:cut], *more]])
    return {"windows": windows, "page_size": page, "prompts": prompts, "locked": locked, "asks": asks}


def show_tree(workload: dict[str, Any]) -> str:
    """Describe the engine, the cached prompts and the keys."""
    windows = ", ".join("none" if w < 0 else str(w) for w in workload["windows"])
    lines = [f"windows {windows}; pages of {amount(workload['page_size'], 'token')}"]
    for space, ids, missing in workload["prompts"]:
        gone = ", ".join(f"{at} of group {number}" for at, number in missing)
        where = f" in namespace {SPACES[space]}" if space else ""
        lines.append(f"cached{where}: {ids}{f', without the pages {gone}' if gone else ''}")
    lines += [f"in use: the first {amount(pages, 'page')} of prompt {i}" for i, pages in workload["locked"]]
    lines += [f"match {ids}{f' in namespace {SPACES[space]}' if space else ''}" for space, ids in workload["asks"]]
    return "\n".join(lines)


class Tree:
    """A student's cache with the prompts of a workload, and a dict that has the same pages."""

    def __init__(
        self, workload: dict[str, Any], build: Callable[[EngineSpec], Any], spec_of: Callable[..., EngineSpec]
    ):
        self.windows, self.size = workload["windows"], workload["page_size"]
        self.spec = spec_of(self.windows, self.size)
        self.needed = [ALL if w < 0 else -(-(w - 1) // self.size) for w in self.windows]
        self.cache = build(self.spec)
        self.pages: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # (space, tokens of the prefix) -> pages by group
        self.users: Counter[int] = Counter()
        paths = [self._add(*prompt) for prompt in workload["prompts"]]
        for prompt, pages in workload["locked"]:
            if not 0 <= prompt < len(paths) or pages < 0:
                raise Invalid
            self._lock(paths[prompt][: pages + 1])

    def _add(self, space: int, ids: list[int], missing: list[list[int]]) -> list[Any]:
        """Add a prompt's pages to the cache, and return its nodes."""
        groups = len(self.windows)
        if not 0 <= space < len(SPACES) or any(not 0 <= g < groups or at < 0 for at, g in missing):
            raise Invalid
        gone = {(at, g) for at, g in missing}
        root = self.cache.roots.get(SPACES[space]) or Node(None, SPACES[space], groups)
        path = Path([root], [])
        self.cache.lock(path)
        self.cache.extend(path, np.array(ids, np.int32))
        for at, node in enumerate(path.nodes[1:]):
            known = self.pages.setdefault((space, tuple(ids[: (at + 1) * self.size])), [ABSENT] * groups)
            for number in range(groups):
                if known[number] == ABSENT and (at, number) not in gone:
                    if len(self.cache.owners) >= self.spec.num_pages:
                        raise Invalid
                    known[number] = 3 * len(self.cache.owners) % self.spec.num_pages
                    while known[number] in self.cache.owners:
                        known[number] = (known[number] + 1) % self.spec.num_pages
                    self.cache.add(node, number, known[number])
                    path.pages.append(known[number])
        nodes = list(path.nodes)
        self.cache.unlock(path)
        return nodes

    def _lock(self, nodes: list[Any]) -> None:
        pages = [page for node in nodes[1:] for page in node.pages if page != ABSENT]
        self.users.update(pages)
        self.cache.lock(Path(list(nodes), pages))

    def state(self) -> Any:
        """Return everything that a match must not change."""
        found, nodes = [], list(self.cache.roots.items())
        while nodes:
            key, node = nodes.pop()
            found.append((repr(key), id(node), list(node.pages), node.held, len(node.children)))
            nodes += node.children.items()
        return sorted(found, key=repr), list(self.cache.unused), dict(self.cache.owners)

    def known(self, space: int, ids: list[int]) -> list[list[int]]:
        """Return the pages by group of each page of tokens that the tree has of the key, from the first on."""
        found = []
        for end in range(self.size, len(ids) + 1, self.size):
            pages = self.pages.get((space, tuple(ids[:end])))
            if pages is None or not self._is_node(space, ids[:end]):
                break
            found.append(pages)
        return found

    def _is_node(self, space: int, ids: list[int]) -> bool:
        """Return whether the tree has a node for the prefix: it has none if no page is left there or below."""
        return any(
            key[0] == space and key[1][: len(ids)] == tuple(ids) and any(page != ABSENT for page in pages)
            for key, pages in self.pages.items()
        )

    @staticmethod
    def longest(known: list[list[int]], needed: list[int], stops: bool = False, beginning: bool = True) -> int:
        """Return the longest valid prefix. With ``stops``, the search ends at the first prefix that is not valid.

        Without ``beginning``, a prefix that is shorter than a window is never valid.
        """
        best = 0
        for n in range(1, len(known) + 1):
            valid = all(
                (beginning or need == ALL or n >= need)
                and all(pages[g] != ABSENT for pages in known[max(n - need, 0) : n])
                for g, need in enumerate(needed)
            )
            if valid:
                best = n
            elif stops:
                break
        return best

    def judge(self, space: int, ids: list[int]) -> None:
        """Check one match. Raise `Broken` with the mistake that leads to just this result."""
        if not 0 <= space < len(SPACES):
            raise Invalid
        before, given = self.state(), np.array(ids, np.int32)
        found = self.cache.match(Key(SPACES[space], given))
        if self.state() != before or not np.array_equal(given, np.array(ids, np.int32)):
            raise Broken(
                "changes", "`match` changes nothing.", f"The match of {short(ids)} changed the tree or its key."
            )
        known = self.known(space, ids)
        right = self.longest(known, self.needed)
        pages = check_form(found, len(self.windows))
        self._check_length(space, ids, len(pages), right, known)
        self._check_pages(ids, found, pages, known[:right])
        again = self.cache.match(Key(SPACES[space], given))
        if again.handle is found.handle or again.handle.nodes is found.handle.nodes or (
            again.handle.pages is found.handle.pages
        ):  # fmt: skip
            raise Broken(
                "shared-result", "Each match returns a `Path` of new lists.", "Two matches have the same list."
            )

    def _check_length(self, space: int, ids: list[int], got: int, right: int, known: list[list[int]]) -> None:
        if got == right:
            return
        seen = f"The match of {short(ids)} has {amount(got, 'page')}; expected {right}."
        raise Broken("short" if got < right else "long", PROMISE, seen)

    def explanations(self, space: int, ids: list[int], got: int) -> set[str]:
        """Return the mistakes that lead to a match of ``got`` pages."""
        known, other = self.known(space, ids), self.known(1 - space, ids)
        need, longest = self.needed, self.longest
        lengths = {
            "stops": longest(known, need, stops=True),
            "whole": longest(known, [ALL for _ in need]),
            "beginning": longest(known, need, beginning=False),
            "one-more": longest(known, [n + (n != ALL) for n in need]),
            "full-only": longest(known, [n if n == ALL else 0 for n in need]),
            "windows-only": longest(known, [0 if n == ALL else n for n in need]),
            "one-less": longest(known, [max(n - (n != ALL), 0) for n in need]),
        }
        found = {cause for cause, length in lengths.items() if length == got}
        return found | ({"namespace"} if got in (longest(known, need), longest(other, need)) else set())

    def _check_pages(self, ids: list[int], found: Any, pages: Any, known: list[list[int]]) -> None:
        used: list[int] = []
        for at, own in enumerate(known):
            for number, need in enumerate(self.needed):
                got, where = int(pages[at, number]), f"The match of {short(ids)}: page {at} of group {number} is "
                if at >= len(known) - need:
                    used.append(own[number])
                    if got != own[number]:
                        raise Broken("exchanged", PROMISE, f"{where}{got}; expected {own[number]}.")
                elif got != self.spec.num_pages:
                    promise = "Where a group needs no page, the result has the scratch page."
                    raise Broken("scratch", promise, f"{where}{got}; expected {self.spec.num_pages}.")
        handle = found.handle
        promise = "The handle has the nodes of the prefix, and the pages that its groups read."
        names = [node.tokens for node in handle.nodes]
        right = [np.array(ids[at * self.size : (at + 1) * self.size], np.int32).tobytes() for at in range(len(known))]
        if len(names) != len(right) + 1 or names[1:] != right:
            seen = f"The match of {short(ids)} has {amount(len(known), 'page')}, and its handle "
            seen += f"{amount(len(names), 'node')}, the root included; or they are other nodes."
            raise Broken("nodes", promise, seen)
        more, less = Counter(handle.pages) - Counter(used), Counter(used) - Counter(handle.pages)
        if more or less:
            seen = f"The match of {short(ids)} reads the pages {used}; its handle names {list(handle.pages)}."
            raise Broken("locks-more" if more else "locks-less", promise, seen)
        unlocked = sum(not self.users[page] for page in used)
        if found.unlocked != unlocked:
            seen = f"The match of {short(ids)} reads {amount(len(used), 'page')}, {unlocked} of them without a user; "
            raise Broken(
                "unlocked", "`unlocked` counts the pages without a user.", f"{seen}`unlocked` is {found.unlocked}."
            )


def why_length(build: Callable[[EngineSpec], Any], spec_of: Callable[..., EngineSpec], cause: str) -> str:
    """Return the mistake that explains the lengths of all matches in 80 random trees, or ``cause`` if none does."""
    left = dict.fromkeys(MISTAKES)
    for seed in range(80):
        workload = make_tree(random.Random(seed), seed)
        tree = Tree(workload, build, spec_of)
        for space, ids in workload["asks"]:
            got = len(tree.cache.match(Key(SPACES[space], np.array(ids, np.int32))).pages)
            found = tree.explanations(space, ids, got)
            left = {name: None for name in left if name in found}
    return next(iter(left), cause)


def check_form(found: Any, groups: int) -> Any:
    """Return the pages of a match. Raise `Broken` if it has another form."""
    promise = "`match` returns a `MatchResult` with a `Path` and an array int32 [pages, groups]."
    lacking = [name for name in ("handle", "pages", "unlocked") if not hasattr(found, name)]
    if lacking:
        raise Broken("form", promise, f"It returned {type(found).__name__}, without `{lacking[0]}`.")
    pages = found.pages
    if not isinstance(pages, np.ndarray) or pages.dtype != np.int32 or pages.ndim != 2 or pages.shape[1] != groups:
        got = f"{pages.dtype} {list(pages.shape)}" if isinstance(pages, np.ndarray) else type(pages).__name__
        raise Broken("form", promise, f"`pages` is {got}.")
    if not isinstance(found.handle, Path) or not isinstance(found.handle.nodes, list):
        raise Broken("form", promise, f"The handle is {type(found.handle).__name__}.")
    return pages


def short(ids: list[int]) -> str:
    """Return a key as text."""
    return str(ids) if len(ids) <= 30 else f"{amount(len(ids), 'token')}"
