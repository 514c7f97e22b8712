"""A proposer of drafts. A call is an event of the lab `draft`: a request is admitted, gains tokens or is removed.

After an event, drafts are asked for: ``ask = [[request, unread tokens, limit], …]``. Each draft must be a copy from the
request's own text. The trace has a line for each event, and a line for each request that is asked about.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minisgl.chapters.lab.gates.draft import Request, judge, make_turns
from minisgl.chapters.lab.gates.draft import spec_of as spec_of_rows
from minisgl.chapters.lab.grader.gate import Broken
from minisgl.chapters.lab.museum.calls import Note, load_plugins
from minisgl.chapters.lab.museum.pieces import NAME
from minisgl.core import Req, SamplingParams
from minisgl.plugin_manager.manager import PluginManager

load = load_plugins
SYMPTOM = "All answers are right. But some requests get other drafts in a batch than alone, and few are accepted."
LAST = 12
"""How many tokens at the end of a text the trace has."""


@dataclass
class Turns:
    """A proposer and its requests, in ``rows`` rows of the request pool."""

    proposer: Any
    match: int
    rows: int
    known: dict[int, tuple[Req, Request]] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)

    def apply(self, event: Mapping[str, Any]) -> str:
        """Tell the proposer an event. Return its kind."""
        if "admit" in event:
            uid, free = (
                event["admit"],
                set(range(self.rows)) - {self.known[other][0].req_pool_idx for other in self.running},
            )
            if uid not in self.known:
                req = Req(uid, np.asarray(event["tokens"], np.int32), SamplingParams(max_tokens=1_000), uid)
                self.known[uid] = req, Request(uid, event["tokens"])
            req = self.known[uid][0]
            req.req_pool_idx = min(free)
            self.running.append(uid)
            self.proposer.admitted(req)
            return "admit"
        if "gain" in event:
            for uid, run in event["gain"]:
                req, request = self.known[uid]
                req.output_ids.extend(run)
                request.tokens.extend(run)
            reqs = [self.known[uid][0] for uid, _ in event["gain"]]
            self.proposer.advanced(reqs, [list(run) for _, run in event["gain"]])
            return "gain"
        if "remove" in event:
            req = self.known[event["remove"]][0]
            self.running.remove(req.uid)
            self.proposer.removed(req)
            req.req_pool_idx = -1
            return "remove"
        return "ask"


def start(manager: PluginManager, workload: Mapping[str, Any]) -> Turns:
    """Make a new proposer, with the sizes of a workload."""
    config = manager.make("speculation", NAME)
    config.match_tokens, config.max_drafts = workload["match"], workload["drafts"]
    lengths = Counter[int]()
    for event in workload["calls"]:
        lengths[event.get("admit", 0)] += len(event.get("tokens", ()))
        lengths.update({uid: len(run) for uid, run in event.get("gain", ())})
    spec = replace(spec_of_rows(workload["rows"]), max_seq_len=max(lengths.values()))
    proposer = manager.build("speculation", config, spec=spec)
    return Turns(proposer, workload["match"], workload["rows"])


def call(turns: Turns, event: Any, note: Note) -> dict[str, int]:
    """Tell the proposer one event, ask for drafts, and compare them with a search through each text."""
    kind, ask = turns.apply(event), event["ask"]
    uids = [uid for uid, _ in event["gain"]] if kind == "gain" else [event[kind]] if kind in event else []
    note(event=kind, requests=uids, asked=[uid for uid, _, _ in ask])
    if not ask:
        return {}
    reqs = [turns.known[uid][0] for uid, _, _ in ask]
    positions = [len(req) + unread for req, (_, unread, _) in zip(reqs, ask, strict=True)]
    drafts = [
        [int(token) for token in run] for run in turns.proposer.propose(reqs, positions, [each[2] for each in ask])
    ]
    if len(drafts) != len(ask):
        seen = f"It returned {len(drafts)} runs of drafts for {len(ask)} requests."
        raise Broken("runs", "`propose` returns one run of drafts for each request, in order.", seen)
    for (uid, unread, limit), run in zip(ask, drafts, strict=True):
        text = turns.known[uid][1].tokens
        note(request=uid, length=len(text), last=text[-LAST:], unread=unread, limit=limit, drafts=run)
    running = [turns.known[uid][1] for uid in turns.running]
    for (uid, unread, limit), run in zip(ask, drafts, strict=True):
        judge(turns.known[uid][1], turns.match, unread, limit, run, running)
    return {}


def draw(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a random history of requests."""
    drawn = make_turns(rng, number)
    return {"calls": drawn.pop("events"), **drawn}
