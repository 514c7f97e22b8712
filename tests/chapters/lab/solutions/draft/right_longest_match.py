"""This proposer finds the longest match: a dict for each length from ``match_tokens`` to twice as many tokens."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.plugins.speculation import DraftProposer


@dataclass
class Mine:
    """Copies what followed the longest match."""

    max_drafts: int = 8
    match_tokens: int = 2

    def build(self):
        return Longest(self)


class Longest(DraftProposer):
    def __init__(self, config):
        self.max_drafts = config.max_drafts
        self.sizes = range(config.match_tokens, 2 * config.match_tokens + 1)
        self.known = {}

    def admitted(self, req):
        self.known[req.uid] = [], [{} for _ in self.sizes]
        self.advanced([req], [req.tokens().tolist()])

    def removed(self, req):
        self.known.pop(req.uid)

    def advanced(self, reqs, tokens):
        for req, run in zip(reqs, tokens, strict=True):
            text, tables = self.known[req.uid]
            for token in run:
                for size, table in zip(self.sizes, tables, strict=True):
                    if len(text) >= size:
                        table[tuple(text[len(text) - size :])] = len(text)
                text.append(int(token))

    def propose(self, reqs, positions, limits):
        return [list(self.guess(*self.known[r.uid], p, n)) for r, p, n in zip(reqs, positions, limits, strict=True)]

    def guess(self, text, tables, position, limit):
        starts = [table.get(tuple(text[-size:])) for size, table in zip(self.sizes, tables, strict=True)]
        found = [start for start in starts if start is not None]
        if found:
            copied = text[found[-1] : found[-1] + position - len(text) + limit]
            while len(copied) < position - len(text) + limit:
                copied.append(copied[len(copied) - (len(text) - found[-1])])
            yield from copied[position - len(text) :]


@hookimpl
def minisgl_configs():
    yield "speculation", "mine", Mine
