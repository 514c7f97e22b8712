"""This proposer keeps arrays by request-pool row, and a dict of hashes whose entries it compares with the tokens."""

from array import array
from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.plugins.speculation import DraftProposer


@dataclass
class Mine:
    """Copies what followed the last tokens; arrays by row."""

    max_drafts: int = 8
    match_tokens: int = 3

    def build(self, spec):
        return Rows(spec.max_running_requests, self.max_drafts, self.match_tokens)


class Rows(DraftProposer):
    def __init__(self, rows, max_drafts, match):
        self.max_drafts, self.match = max_drafts, match
        self.ids = [array("q") for _ in range(rows)]
        self.newest = [{} for _ in range(rows)]  # hash → the end of the latest group with it
        self.older = [array("q") for _ in range(rows)]  # end of a group → the end of the one before it, or 0

    def admitted(self, req):
        row = req.req_pool_idx
        self.ids[row], self.newest[row], self.older[row] = array("q"), {}, array("q")
        self.add(row, req.tokens())

    def advanced(self, reqs, tokens):
        for i, req in enumerate(reqs):
            self.add(req.req_pool_idx, tokens[i])

    def removed(self, req):
        self.admitted_nothing(req.req_pool_idx)

    def admitted_nothing(self, row):
        self.ids[row], self.newest[row], self.older[row] = array("q"), {}, array("q")

    def key(self, ids, end):
        return hash(ids[end - self.match : end].tobytes()) % 1_000_003

    def add(self, row, tokens):
        ids, newest, older = self.ids[row], self.newest[row], self.older[row]
        for token in tokens:
            end = len(ids)
            older.append(0)
            if end >= self.match:
                key = self.key(ids, end)
                older[end] = newest.get(key, 0)
                newest[key] = end
            ids.append(int(token))

    def find(self, row):
        ids = self.ids[row]
        if len(ids) <= self.match:
            return 0
        end = self.newest[row].get(self.key(ids, len(ids)), 0)
        while end and ids[end - self.match : end] != ids[len(ids) - self.match :]:
            end = self.older[row][end]
        return end

    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits, strict=True):
            ids, end = self.ids[req.req_pool_idx], self.find(req.req_pool_idx)
            skip = position - len(ids)
            drafts.append(tuple(ids[end + i % (len(ids) - end)] for i in range(skip, skip + limit)) if end else ())
        return drafts


@hookimpl
def minisgl_configs():
    yield "speculation", "mine", Mine
