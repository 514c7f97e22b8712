"""The glossary, and the rule that no page uses a term before it was defined.

A page defines a term where it writes ``**prefill**{ .term }``. Pages are read in the order of the navigation; a page
that comes earlier may use the term only with a link to its place in the glossary. Knows Markdown texts and nothing of
mkdocs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from minisgl.course.site.blocks import map_text, prose, without_blocks

MARK = re.compile(r"\*\*(?P<name>[^*\n]+)\*\*\{\s*\.term\s*\}")
_HEADING = re.compile(r"^### (?P<name>[^{\n]+?)[ ]*(?:\{(?P<attributes>[^}]*)\})?[ ]*$", re.MULTILINE)
_ALSO = re.compile(r"^\*also: (.+)\*$", re.MULTILINE)


class Term(NamedTuple):
    """One entry. ``names``: its own and its aliases, in lower case. An ``everyday`` word means other things too, so
    its use is not checked."""

    name: str
    anchor: str
    names: tuple[str, ...]
    everyday: bool
    text: str


def glossary(markdown: str) -> list[Term]:
    """The entries of docs/glossary.md: ``### name``, an optional line ``*also: other, names*``, a paragraph."""
    found = []
    heads = list(_HEADING.finditer(markdown))
    for head, after in zip(heads, [*heads[1:], None], strict=False):
        text = markdown[head.end() : after.start() if after else len(markdown)]
        also = _ALSO.search(text)
        others = [name.strip() for name in also[1].split(",")] if also else []
        names = tuple(name.lower() for name in (head["name"], *others))
        everyday = ".everyday" in (head["attributes"] or "")
        found.append(Term(head["name"], anchor(head["name"]), names, everyday, _ALSO.sub("", text).strip()))
    return found


def anchor(name: str) -> str:
    """The anchor that Markdown gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", name).strip().lower())


def look_up(terms: Sequence[Term], name: str) -> Term | None:
    """The term of this name, alias or plural."""
    wanted = name.lower()
    for term in terms:
        if wanted in term.names or wanted in {f"{each}s" for each in term.names}:
            return term
    return None


def link_marks(markdown: str, terms: Sequence[Term], address: str) -> str:
    """Marked definitions as links to the glossary, whose page is ``address`` from here."""

    def link(match: re.Match[str]) -> str:
        term = look_up(terms, match["name"])
        return f"**[{match['name']}]({address}#{term.anchor})**{{ .term }}" if term else match[0]

    return map_text(markdown, lambda text: MARK.sub(link, text))


def check(pages: Sequence[tuple[str, str]], terms: Sequence[Term]) -> list[str]:
    """What breaks the rule: ``pages`` are (path, Markdown) in reading order."""
    problems = []
    defined: dict[str, int] = {}
    for i, (path, text) in enumerate(pages):
        for match in MARK.finditer(without_blocks(text)):
            term = look_up(terms, match["name"])
            if term is None:
                problems.append(f"{path} defines {match['name']!r}, which docs/glossary.md does not have")
            elif defined.setdefault(term.name, i) != i:
                first = pages[defined[term.name]][0]
                problems.append(f"{path} defines {term.name!r} again; {first} did before")
    for i, (path, text) in enumerate(pages):
        read = prose(text)
        linked = set(re.findall(r"glossary\.md#([\w-]+)", text))
        for term in terms:
            if term.everyday or term.anchor in linked or defined.get(term.name, len(pages)) <= i:
                continue
            used = _use(term).search(read)
            if used:
                where = f"{pages[defined[term.name]][0]} defines it" if term.name in defined else "no page defines it"
                problems.append(f"{path} uses {used[0]!r} and {where}: define it, or link to glossary.md#{term.anchor}")
    return problems


def check_glossary(terms: Sequence[Term]) -> list[str]:
    """What is wrong with the glossary itself."""
    names = [term.name.lower() for term in terms]
    problems = [f"{term.name!r} has no paragraph" for term in terms if not term.text]
    problems += [f"{term.name!r} has more than one paragraph" for term in terms if "\n\n" in term.text]
    problems += [f"{b!r} stands after {a!r}" for a, b in pairwise(names) if b < a]
    every = [name for term in terms for name in term.names]
    return problems + [f"{name!r} stands for two terms" for name in sorted({n for n in every if every.count(n) > 1})]


def _use(term: Term) -> re.Pattern[str]:
    """Any of the term's names as whole words, in the singular or the plural; line breaks count as spaces."""
    names = "|".join(re.escape(name).replace(r"\ ", r"\s+") for name in term.names)
    return re.compile(rf"(?<![\w-])(?:{names})(?:s|es)?(?![\w-])", re.IGNORECASE)
