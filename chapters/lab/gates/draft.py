"""Gates of lab `draft`: each part alone, the drafts on given texts, the cost of a turn, `tutor`, and the server.

A wrong draft changes no answer, so no gate that compares answers finds a fault of a proposer. These gates compare each
draft with a search through the whole text of the request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from minisgl.chapters.lab.grader.conformance import conformance
from minisgl.chapters.lab.grader.draft_texts import replay, steps_of, tokens_of
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student
from minisgl.chapters.lab.grader.held import ARRAYS, container_sizes, cpu_clock, traced
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.chapters.lab.grader.tutor_runs import chat
from minisgl.chapters.lab.grader.unseen_texts import unseen_texts
from minisgl.core import EngineSpec, Req, SamplingParams
from minisgl.plugins.speculation import DraftProposer
from minisgl.testing.drive import make_plugin
from minisgl.testing.proposer import ProposerConformance, running_request


def spec_of(rows: int) -> EngineSpec:
    """Return the sizes of an engine with ``rows`` request-pool rows."""
    return EngineSpec(page_size=4, num_pages=400, max_running_requests=rows, max_seq_len=1_600, vocab_size=2**25)


MIN_TOKENS_A_STEP = 1.6
"""Tokens a step on the given texts, with the options of the skeleton; the reference has 1.63."""
ALPHABETS = ([0, 1], [0, 1, 2], [3, 4, 5, 6], [9, 90, 909, 9_090], [256, 512, 1_024], [1, 2**16, 2**24, 2**24 + 1])
"""Token ids of the workloads: few, so that groups occur again, and such that different groups may be mixed up."""
PROMISE = "The drafts are what followed the latest earlier occurrence of the last `match_tokens` tokens of the request."


def build(student: Student, workload: dict[str, Any]) -> Any:
    """Return the student's proposer with the options ``match`` and ``drafts`` of a workload."""
    match, drafts, rows = workload["match"], workload["drafts"], workload.get("rows", 4)
    if match < 1 or drafts < 1 or rows < 1:
        raise Invalid
    try:
        config = student.config(match_tokens=match, max_drafts=drafts)
    except TypeError as error:
        raise Broken("options", "The options are `max_drafts` and `match_tokens`.", f"{error}.") from error
    proposer = student.make(config, spec=spec_of(rows))
    if proposer.max_drafts != drafts:
        seen = f"With max_drafts={drafts}, the proposer's `max_drafts` is {proposer.max_drafts!r}."
        raise Broken("options", "The proposer's `max_drafts` is the option of that name.", seen)
    return proposer


# ---- the parts of a text --------------------------------------------------------------------------------


def make_text(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random text, appended in several runs. One text is a single token again and again: long groups recur."""
    if size == 20:
        return {"match": 33, "drafts": 9, "runs": [[7] * 20, [7] * 30]}
    letters = rng.choice(ALPHABETS)
    runs = [
        [rng.choice(letters) for _ in range(rng.randint(1, 1 + size))] for _ in range(rng.randint(1, 1 + size // 4))
    ]
    match, drafts = rng.choice([1, 2, 3, 4, 10]), rng.choice([rng.randint(1, 9), rng.randint(1, 9), 130, 1_000])
    return {"match": match, "drafts": drafts, "runs": runs}


def show_text(workload: dict[str, Any]) -> str:
    """Describe the text in a line per run."""
    lines = [f"match_tokens={workload['match']}"]
    return "\n".join(lines + [f"append: {' '.join(map(str, run))}" for run in workload["runs"]])


def text_of(student: Student, workload: dict[str, Any]) -> Any:
    """Return a text of the student's proposer with all runs appended, or None if the proposer has no texts."""
    proposer = build(student, workload)
    if not any(workload["runs"]):
        raise Invalid
    if not hasattr(proposer, "new_text"):
        run_turns(student, _as_turns(workload))
        return None
    text = proposer.new_text()
    given = [list(run) for run in workload["runs"]]
    for run in given:
        text.append(run)
    _unchanged("append", given, workload["runs"])
    return text


def _unchanged(method: str, given: list[list[int]], before: list[list[int]]) -> None:
    """Raise `Broken` if a list that a method got is another one after all calls."""
    for run, was in zip(given, before, strict=True):
        if run != was:
            promise = f"`{method}` does not change the lists that it gets, and later calls do not change them."
            raise Broken("changes", promise, f"A list was {_few(was)}, and is {_few(run)} after all calls.")


def _as_turns(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the turns of one request whose text this is."""
    first, *others = workload["runs"]
    ask = [[1, 0, workload["drafts"]]]
    events: list[dict[str, Any]] = [{"admit": 1, "tokens": first, "ask": ask}]
    events += [{"gain": [[1, run]], "ask": ask} for run in others]
    return {"match": workload["match"], "drafts": workload["drafts"], "rows": 1, "events": events}


def run_index(student: Student, workload: dict[str, Any]) -> None:
    """Grade `append` alone. A proposer without texts is graded as a whole."""
    text = text_of(student, workload)
    if text is None or not hasattr(text, "after"):
        return
    tokens = [token for run in workload["runs"] for token in run]
    if list(text.tokens) != tokens:
        seen = f"`tokens` is {_few(text.tokens)} after {_few(tokens)} were appended."
        raise Broken("tokens", "`tokens` holds all tokens of the text, in order.", seen)
    n = workload["match"]
    expected = {tuple(tokens[i - n : i]): i for i in range(n, len(tokens))}
    promise = "`after` maps each group to the index of the token after its latest occurrence that a token follows."
    for group, index in expected.items():
        if group not in text.after:
            seen = f"`after` has no entry {group}; expected {index}, the index of the token after this group."
            raise Broken("missed", promise, seen)
        if text.after[group] != index:
            got, earlier = text.after[group], [i for i in range(n, index) if tuple(tokens[i - n : i]) == group]
            what = {index - 1: ", the index of the group's last token", index - n: ", the index of its first token"}
            seen = f"`after[{group}]` is {got}{what.get(got, '') if got not in earlier else ''}; expected {index}: "
            seen += f"the token after the group's latest occurrence is at index {index}."
            raise Broken("latest" if got in earlier else "place", promise, seen)
    extra = [group for group in text.after if group not in expected]
    if extra:
        last = tuple(tokens[-n:]) if len(tokens) >= n else ()
        where = ", the end of the text, which no token follows yet" if tuple(extra[0]) == last else ""
        seen = f"`after` has the group {_few(extra[0])}{where}."
        raise Broken("itself" if where else "match", promise, seen)


def run_copy(student: Student, workload: dict[str, Any]) -> None:
    """Grade `copy` alone, for every count. A proposer without texts is graded as a whole."""
    text = text_of(student, workload)
    if text is None:
        return
    tokens = [token for run in workload["runs"] for token in run]
    for count in (workload["drafts"], 0, 1, workload["drafts"] + 1):
        got = text.copy(count)
        if not isinstance(got, Sequence):
            seen = f"`copy({count})` returned {got!r:.40}; expected a list."
            raise Broken("returns", "`copy` returns a list of token ids, which is empty without guesses.", seen)
        got = list(got)
        judge(Request(1, tokens), workload["match"], 0, count, got, [])
        if list(text.copy(count)) != got:
            seen = f"`copy({count})` returned {_few(got)}, and then {_few(text.copy(count))}."
            raise Broken("again", "`copy` changes nothing.", seen)


# ---- turns of several requests ------------------------------------------------------------------------------


class Request:
    """One request of a workload: its tokens, how many of them are the prompt, and how often it was admitted."""

    def __init__(self, uid: int, tokens: Sequence[int]):
        self.uid, self.tokens, self.prompt, self.admissions = uid, list(tokens), len(tokens), 1
        self.last_of_each = list(tokens)  # what the text would be with the last token of each turn only
        self.restarted = list(tokens)  # what it would be if a request that runs again began with its prompt

    def drafts(self, match: int, unread: int, limit: int) -> Iterator[list[int]]:
        """Yield the drafts after the latest occurrence of the last ``match`` tokens, or of more of them."""
        for n in range(match, len(self.tokens)):
            ends = list(self.ends(n))
            if not ends:
                return
            yield self.continued(ends[-1], unread, limit)

    def ends(self, n: int) -> Iterator[int]:
        """Yield the index after each earlier occurrence of the last ``n`` tokens, the first one first."""
        tokens = self.tokens
        if n <= len(tokens):
            last = tokens[len(tokens) - n :]
            yield from (end for end in range(n, len(tokens)) if tokens[end - n : end] == last)

    def fits(self, tokens: list[int], match: int, unread: int, limit: int, got: list[int]) -> bool:
        """Return whether ``got`` are the drafts of another text, ``tokens``, which lacks some of the request's."""
        missing, other = len(self.tokens) - len(tokens), Request(self.uid, tokens)
        return bool(got and missing) and any(got in other.drafts(match, n, limit) for n in (unread, unread + missing))

    def continued(self, end: int, unread: int, limit: int) -> list[int]:
        """Return the guesses that copy from index ``end`` on, without the guess for the unread token."""
        period = len(self.tokens) - end
        return [self.tokens[end + i % period] for i in range(unread, unread + limit)]


def make_turns(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random history of requests, in ``rows`` rows: they come, gain tokens, leave, and run again."""
    if size == CROWD:
        return crowd(rng)
    if size == EQUAL_TEXTS:
        return equal_texts()
    letters, most, rows = rng.choice(ALPHABETS), rng.randint(1, rng.choice([8, 20, 130])), rng.choice([2, 4, 20])
    first, apart, long = rng.choice([0, 0, 10**12]), rng.choice([1, 1, 2**10, 2**32]), rng.choice([10, 10, 60, 140])
    events: list[dict[str, Any]] = []
    running: list[int] = []
    left: list[int] = []
    prompts: list[list[int]] = []
    for k in range(2 + size):
        event: dict[str, Any] = {}
        kind = rng.random()
        if not running or (kind < (0.5 if rows > 4 else 0.25) and len(running) < rows):
            if left and rng.random() < 0.5:
                uid = left.pop(rng.randrange(len(left)))
                event = {"admit": uid, "tokens": []}
            else:
                uid = first + k * apart  # `first` is the smallest uid
                prompt = [rng.choice(letters) for _ in range(rng.randint(1, 4 + size // 2))]
                prompts.append(rng.choice(prompts) if prompts and rng.random() < 0.25 else prompt)  # a prompt again
                event = {"admit": uid, "tokens": prompts[-1]}
            running.append(uid)
        elif kind < 0.35:
            uid = running.pop(rng.randrange(len(running)))
            left.append(uid)
            event = {"remove": uid}
        else:
            some = rng.sample(running, rng.randint(1, len(running)))
            event = {"gain": [[uid, [rng.choice(letters) for _ in range(rng.randint(1, long))]] for uid in some]}
        some = rng.sample(running, rng.randint(0, len(running)))
        event["ask"] = [[uid, rng.randint(0, 1), rng.choice([most, *[rng.randint(0, most)] * 3])] for uid in some]
        events.append(event)
        unread = [[uid, 0, limit] for uid, pending, limit in event["ask"] if pending]
        if unread and rng.random() < 0.5:  # the unread token was another one; the same positions and limits again
            events.append({"gain": [[uid, [rng.choice(letters)]] for uid, _, _ in unread], "ask": unread})
    return {"match": rng.choice([1, 2, 3, 4, 5, 9]), "drafts": most, "rows": rows, "events": events}


CROWD = 12
"""The number of the workload with many requests."""
EQUAL_TEXTS = 1
"""The number of the workload in which several requests have equal tokens."""


def equal_texts() -> dict[str, Any]:
    """Return a history in which requests are admitted with the tokens of a running one, and then gain others.

    Request 2 has the prompt of request 1. Request 3 has the prompt and the output of request 1. Request 4 has the
    prompt of request 1, which has ended. Each gains a token last that occurs only in another of them.
    """
    events: list[dict[str, Any]] = [
        {"admit": 1, "tokens": [5, 6], "ask": []},
        {"admit": 2, "tokens": [5, 6], "ask": [[2, 0, 2]]},
        {"gain": [[1, [8, 9]]], "ask": [[1, 0, 2]]},
        {"gain": [[2, [1, 2, 8]]], "ask": [[2, 0, 2], [1, 0, 2]]},
        {"admit": 3, "tokens": [5, 6, 8, 9], "ask": [[3, 0, 2]]},
        {"gain": [[1, [7, 4, 3]]], "ask": [[1, 0, 2]]},
        {"gain": [[3, [1, 2, 7]]], "ask": [[3, 0, 2], [1, 0, 2]]},
        {"remove": 1, "ask": []},
        {"admit": 4, "tokens": [5, 6], "ask": [[4, 0, 2]]},
        {"gain": [[4, [1, 2, 3, 9]]], "ask": [[4, 0, 2], [3, 0, 2], [2, 0, 2]]},
        {"admit": 1, "tokens": [], "ask": [[1, 0, 2]]},
        {"gain": [[1, [2]], [4, [7]]], "ask": [[1, 0, 2], [4, 0, 2]]},
    ]
    return {"match": 1, "drafts": 2, "rows": 4, "events": events}


def crowd(rng: random.Random) -> dict[str, Any]:
    """Return a history in which 300 requests run at once, all gain tokens in one turn, and all are asked about."""
    uids = list(range(300))
    texts = {uid: [rng.randrange(uid, uid + 3) for _ in range(6)] for uid in uids}
    gain = [[uid, [uid, uid + 1, uid]] for uid in uids]
    ask = [[uid, uid % 2, 4] for uid in reversed(uids)]
    events: list[dict[str, Any]] = [{"admit": uid, "tokens": texts[uid], "ask": []} for uid in uids]
    events += [{"gain": gain, "ask": ask}, {"remove": 7, "ask": []}, {"gain": gain[8:], "ask": ask[:200]}]
    return {"match": 2, "drafts": 4, "rows": 300, "events": events}


def show_turns(workload: dict[str, Any]) -> str:
    """Describe the history in a line per event."""
    lines = [f"match_tokens={workload['match']} max_drafts={workload['drafts']}"]
    for event in workload["events"]:
        if "admit" in event:
            tokens = " ".join(map(str, event["tokens"])) or "runs again"
            line = f"request {event['admit']} is admitted: {tokens}"
        elif "gain" in event:
            line = "gained: " + ", ".join(f"request {uid} {' '.join(map(str, run))}" for uid, run in event["gain"])
        else:
            line = f"request {event['remove']} is removed"
        asked = [f"{uid} (at most {limit}{', 1 unread' if unread else ''})" for uid, unread, limit in event["ask"]]
        lines.append(line + (f"; drafts for request {', '.join(asked)}" if asked else ""))
    return "\n".join(lines)


def run_turns(student: Student, workload: dict[str, Any]) -> None:
    """Grade the whole proposer: alone, and then while another proposer serves other requests with the same uids."""
    _serve(build(student, workload), workload, None)
    try:
        _serve(build(student, workload), workload, build(student, workload))
    except Invalid:
        raise
    except Exception as error:  # the same calls were right for one proposer
        promise = "Two proposers know nothing of each other: a process may have several engines."
        what = error.seen if isinstance(error, Broken) else f"{type(error).__name__}: {error}."
        raise Broken("shared", promise, f"With two proposers in a process: {what}") from error


def try_turns(student: Student) -> str:
    """Search for wrong drafts, then check that nothing stays of removed requests, whatever the reason was."""
    reasons = (None, "stop", "length", "abort", "error") if student.replay is None else ()
    try:
        note = search(make_turns, run_turns, tries=80, at_least=CROWD, show=show_turns)(student)
    except Broken as broken:
        if broken.cause in ("wrong", "retracted"):  # a text that was kept leads to such drafts too, and can be seen
            for reason in reasons:
                run_removed(student, reason)
        raise
    for reason in reasons:
        run_removed(student, reason)
    return note


def run_removed(student: Student, reason: Any, number: int = 40) -> None:
    """Check that the proposer keeps nothing of requests that ran one after another. ``reason`` None: a retraction."""
    proposer = build(student, {"match": 2, "drafts": 4, "rows": number})
    before = container_sizes(proposer)  # a row of the request pool may have an array that its next request uses
    for uid in range(number):
        req = running_request(uid, [1, 2, 3, 1, 2], uid)
        proposer.admitted(req)
        proposer.propose([req], [len(req)], [2])
        req.output_ids.append(3)
        proposer.advanced([req], [[3]])
        req.finish_reason = reason
        proposer.removed(req)
    grown = {name: size - before.get(name, 0) for name, size in container_sizes(proposer).items()}
    grown = {name: size for name, size in grown.items() if not name.endswith(ARRAYS)}
    if grown and max(grown.values()) >= number:
        name = max(grown, key=grown.__getitem__)
        why = f"ended ({reason})" if reason else "were retracted"
        seen = f"{number} requests {why} and were removed. There are {grown[name]} entries more in {name}."
        raise Broken("leak", "Nothing of a removed request stays.", seen)


def _serve(proposer: Any, workload: dict[str, Any], decoy: Any) -> None:
    """Tell the proposer the events and judge its drafts. ``decoy`` gets the same calls with other tokens."""
    known: dict[int, tuple[Req, Request]] = {}
    running: list[int] = []
    given: list[list[int]] = []  # the lists that `advanced` got
    before: list[list[int]] = []
    results: list[tuple[Any, list[list[int]]]] = []  # of `propose`, and what they were at that time
    for event in workload["events"]:
        if "admit" in event:
            _admit(proposer, known, running, event, decoy, workload["rows"])
        elif "gain" in event:
            given += _gain(proposer, known, running, event, decoy)
            before += [list(run) for _, run in event["gain"]]
        else:
            if event["remove"] not in running:
                raise Invalid
            running.remove(event["remove"])
            req, _ = known[event["remove"]]
            for each in filter(None, (proposer, decoy)):
                each.removed(req)
            req.req_pool_idx = -1
        results += _ask(proposer, known, running, event["ask"], workload)
    _unchanged("advanced", given, before)
    for drafts, were in results:
        now = [[int(token) for token in run] for run in drafts]
        if now != were:
            seen = f"A call returned {were!s:.60}. After later calls, the same object is {now!s:.60}."
            raise Broken("again", "`propose` changes nothing, also not the result of an earlier call.", seen)


def _admit(
    proposer: Any, known: dict[int, Any], running: list[int], event: dict[str, Any], decoy: Any, size: int
) -> None:
    uid = event["admit"]
    if uid in running or len(running) >= size or bool(event["tokens"]) == (uid in known):
        raise Invalid
    free = set(range(size)) - {known[other][0].req_pool_idx for other in running}
    if uid in known:
        known[uid][1].admissions += 1
    else:
        known[uid] = (
            _Counted(uid, event["tokens"], SamplingParams(max_tokens=1_000), uid),
            Request(uid, event["tokens"]),
        )
    req, request = known[uid]
    request.last_of_each, request.restarted = list(request.tokens), request.tokens[: request.prompt]
    req.req_pool_idx = max(free) if request.admissions > 1 else min(free)
    running.append(uid)
    proposer.admitted(req)
    if decoy is not None:
        other = running_request(uid, [token ^ 1 for token in event["tokens"]] or [1], req.req_pool_idx)
        decoy.admitted(other)


def _gain(
    proposer: Any, known: dict[int, Any], running: list[int], event: dict[str, Any], decoy: Any
) -> list[list[int]]:
    uids = [uid for uid, _ in event["gain"]]
    if (
        not uids
        or not set(uids) <= set(running)
        or len(set(uids)) < len(uids)
        or not all(run for _, run in event["gain"])
    ):
        raise Invalid
    for uid, run in event["gain"]:
        known[uid][0].output_ids.extend(run)
        known[uid][1].tokens.extend(run)
        known[uid][1].last_of_each.append(run[-1])
        known[uid][1].restarted.extend(run)
    reqs, runs = [known[uid][0] for uid in uids], [list(run) for _, run in event["gain"]]
    _at_once("advanced", reqs, lambda: proposer.advanced(reqs, runs))
    if runs != [run for _, run in event["gain"]]:
        raise Broken("changes", "`advanced` does not change its arguments.", f"The runs are {runs} afterwards.")
    if decoy is not None:
        decoy.advanced(reqs, [[token ^ 1 for token in run] for run in runs])
    return runs


def _at_once(method: str, reqs: Sequence[Any], call: Callable[[], Any]) -> Any:
    """Return what a method returns. Raise `Broken` if it copies all tokens of a request."""
    for req in reqs:
        req.copied = 0
    result = call()
    copied = next((req for req in reqs if req.copied), None)
    if copied is not None:
        promise = "The time of a turn does not grow with the length of the text."
        seen = f"`{method}` called `req.tokens()`, which copies all {len(copied)} tokens of the request."
        raise Broken("scan", promise, seen, request=copied.uid)
    return result


def _ask(
    proposer: Any, known: dict[int, Any], running: list[int], ask: list[list[int]], workload: dict[str, Any]
) -> list[tuple[Any, list[list[int]]]]:
    """Ask for drafts, twice, and judge them. Return what the first call returned, and a copy of it as lists."""
    if not ask:
        return []
    if not {uid for uid, _, _ in ask} <= set(running) or len({uid for uid, _, _ in ask}) < len(ask):
        raise Invalid
    if any(limit > workload["drafts"] or unread > 1 for _, unread, limit in ask):
        raise Invalid
    reqs = [known[uid][0] for uid, _, _ in ask]
    positions, limits = [len(req) + unread for req, (_, unread, _) in zip(reqs, ask, strict=True)], [a[2] for a in ask]
    given = list(positions), list(limits)
    drafts = _at_once("propose", reqs, lambda: proposer.propose(reqs, *given))
    if given != (positions, limits):
        seen = f"`positions` and `limits` were {positions} and {limits}, and are {given[0]} and {given[1]}."
        raise Broken("changes", "`propose` does not change its arguments.", seen)
    for req, (uid, _, _) in zip(reqs, ask, strict=True):
        if req.tokens().tolist() != known[uid][1].tokens:
            seen = f"The tokens of request {uid} are {_few(req.tokens().tolist())} afterwards."
            raise Broken("changes", "A proposer does not change requests.", seen, request=uid)
    try:
        plain = [[int(token) for token in run] for run in drafts]
    except TypeError as error:
        seen = f"It returned {drafts!r:.60}."
        raise Broken("returns", "`propose` returns a sequence of token ids for each request.", seen) from error
    if len(plain) != len(ask):
        seen = f"It returned {len(plain)} runs of drafts for {len(ask)} requests."
        raise Broken("runs", "`propose` returns one run of drafts for each request, in order.", seen)
    texts = [known[uid][1] for uid in running]
    for req, (uid, unread, limit), run in zip(reqs, ask, plain, strict=True):
        if unread and limit == 1 and not run and workload["drafts"] > 1:  # why there is none: are there some of two?
            (more,) = proposer.propose([req], [len(req) + 1], [2])
            if len(more):
                limit, run = 2, [int(token) for token in more]
        elif unread and limit == 1 and not run and any(known[uid][1].drafts(workload["match"], 1, 1)):
            (without,) = proposer.propose([req], [len(req)], [1])
            if len(without):
                seen = "A request got no draft although its limit is 1. Without an unread token, it gets one."
                raise Broken("count", PROMISE, seen, request=uid)
        judge(known[uid][1], workload["match"], unread, limit, run, texts)
    again = [list(run) for run in proposer.propose(reqs, list(positions), list(limits))]
    if again != plain:
        raise Broken("again", "`propose` changes nothing.", f"Asked twice, it returned {plain} and then {again}.")
    return [(drafts, plain)]


def judge(request: Request, match: int, unread: int, limit: int, got: list[int], running: list[Request]) -> None:
    """Raise `Broken` if ``got`` are not the drafts of a request, with the mistake that explains them."""
    right = list(request.drafts(match, unread, limit))
    if got in right or (not right and not got):
        return
    cause, what = _mistake(request, match, unread, limit, got, right, running)
    last = _few(request.tokens[-match:])
    expected = f"; expected {_few(right[0])}" if right else "; expected none"
    seen = f"The text ends with {last}, and the drafts are {_few(got)}{expected}. {what}"
    raise Broken(cause, PROMISE, seen, request=request.uid if running else None)


def _mistake(
    request: Request,
    match: int,
    unread: int,
    limit: int,
    got: list[int],
    right: list[list[int]],
    running: list[Request],
) -> tuple[str, str]:
    """Return the cause of wrong drafts, and a sentence about them."""
    if len(got) > limit:
        return "limit", f"At most {limit} drafts are allowed."
    if request.fits(request.restarted, match, unread, limit, got):
        return "retracted", "The request runs again after a retraction, with the output that it had."
    if unread and got and got in request.drafts(match, 0, limit):
        return "unread", "The first draft is the guess for the unread token."
    if not unread and got and got in request.drafts(match, 1, limit):
        return "unread", "They would be right if the request had an unread token."
    if right and got == right[0][: len(got)]:
        if unread and len(got) == limit - unread and (got or len(request.tokens) == request.prompt):
            return "count", f"`limits[i]` was {limit}: the drafts after the guess for the unread token."
        if got:
            return "few", f"{limit} drafts are allowed, and the copy can go on with the guesses themselves."
        if len(request.tokens) - request.prompt and request.admissions > 1:
            return "retracted", "The request runs again after a retraction, with the output that it had."
        unread_too = " The first guess is for the unread token, and is no draft." if unread else ""
        return "missed", "This group occurred before." + unread_too
    if got and got in [request.continued(end, unread, limit) for end in request.ends(match)]:
        return "latest", "They follow an earlier occurrence than the latest one."
    if request.fits(request.last_of_each, match, unread, limit, got):
        return "run", "They fit the text without the tokens that it gained together with others."
    for other in running:
        if other is not request and got and _occurs(other.tokens, got) and not _occurs(request.tokens, got):
            return "other", f"They are tokens of request {other.uid}."
    shorter = [request.continued(end, unread, limit) for n in range(1, match) for end in request.ends(n)]
    if got and not right and got in shorter:
        return "match", f"Fewer than {match} tokens are equal at both places."
    return "wrong", "They are no copy of what followed these tokens in this request."


def _occurs(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens) - len(part) + 1))


def _few(tokens: Sequence[int]) -> str:
    """Return at most eight tokens as text."""
    shown = " ".join(map(str, tokens[:8]))
    return f"[{shown}{' …' if len(tokens) > 8 else ''}]" if shown else "none"


# ---- acceptance and cost ------------------------------------------------------------------------------------


def run_acceptance(student: Student) -> str:
    """Count the tokens a step on the given texts, with 8 drafts after 3 equal tokens."""
    promise = (
        f"A step gains {MIN_TOKENS_A_STEP} tokens or more on the given texts, and text without repeats gets no drafts."
    )
    found = steps_of(build(student, {"match": 3, "drafts": 8}))
    own = found["own words"]
    if own.drafts:
        seen = f"An answer in which no 3 tokens occur twice got {own.drafts} drafts, and {own.accepted} were right."
        raise Broken("match", promise, seen)
    tokens, steps = sum(each.tokens for each in found.values()), sum(each.steps for each in found.values())
    if tokens < MIN_TOKENS_A_STEP * steps:
        parts = ", ".join(f"{name} {each.tokens / each.steps:.2f}" for name, each in found.items())
        raise Broken(
            "acceptance", promise, f"{tokens} tokens took {steps} steps, {tokens / steps:.2f} a step: {parts}."
        )
    return f"{tokens / steps:.2f} tokens a step with match_tokens=3"


DRAFT_COST = 0.1
"""What a draft costs, in steps, in the number to beat."""
MOST_COST, TIMES = 0.82, "times the cost of `match_tokens=3`"
"""The number to beat. Other constants, and the longest match, reach 0.9."""


def cost_of(proposer: DraftProposer, seed: random.Random) -> tuple[float, int, int, int]:
    """Return the cost of new texts: their steps and a tenth of their drafts; and the tokens, steps and drafts."""
    found = [replay(proposer, *tokens_of(text), uid=uid) for uid, text in enumerate(unseen_texts(seed), 1)]
    tokens, steps, drafts = (sum(column) for column in list(zip(*found, strict=True))[:3])
    return steps + DRAFT_COST * drafts, tokens, steps, drafts


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Compare the student's proposer with `lookup` on new texts, with `drafting=own` if the file has this option."""
    own = {"drafting": "own"} if "drafting" in student.options() else {}
    spec = EngineSpec(page_size=4, num_pages=400, max_running_requests=4, max_seq_len=1_600, vocab_size=2**17)
    cost, tokens, steps, drafts = cost_of(student.make(student.config(**own), spec=spec), student.random)
    times = cost / cost_of(make_plugin("speculation", "lookup"), student.random)[0]
    counted = f"{times:.2f} {TIMES}, {tokens / steps:.2f} tokens a step, {drafts:,} drafts"
    return counted, round(times, 2) <= MOST_COST


SHORT, LONG = 2_000, 300_000
TURNS = ((1, 0), (6, 0), (1, 1))
"""Kinds of turns whose time is measured: the tokens that the request gains, and how many are unread."""


class _Counted(Req):
    """A request that counts how many of its tokens were copied by `tokens`."""

    copied = 0

    def tokens(self) -> Any:
        self.copied += len(self)
        return super().tokens()


class _Read(list[int]):
    """A list that counts how many of its elements loops and slices may have read."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found


def run_cost(student: Student) -> str:
    """Compare the time of a turn after a long prompt with that after a short one, and of copies from both of its ends.

    The processor time of the fastest turns. The margin is wide: on a busy machine, the entries of a large index are not
    in the processor's cache. A scan of the long text takes a millisecond or more.
    """
    promise = "The time of a turn does not grow with the length of the text."
    micro = {length: 1e6 * turn_seconds(student, length, length - 600, promise) for length in (SHORT, LONG)}
    if micro[LONG] > 10 * micro[SHORT] + 300:
        seen = f"A turn took {micro[SHORT]:.0f} µs after {SHORT:,} tokens, and {micro[LONG]:.0f} µs after {LONG:,}."
        raise Broken("scan", promise, seen)
    early = 1e6 * turn_seconds(student, LONG, 1_000, promise)
    if early > 3 * micro[LONG] + 100:
        seen = (
            f"After {LONG:,} tokens, a turn that copies from near the end took {micro[LONG]:.0f} µs, and one that "
            f"copies from near the beginning {early:.0f} µs: more was read than the drafts."
        )
        raise Broken("scan", promise, seen)
    return f"{micro[SHORT]:.0f} µs a turn after {SHORT:,} tokens, {max(micro[LONG], early):.0f} µs after {LONG:,}"


def turn_seconds(student: Student, length: int, start: int, promise: str) -> float:
    """Return the seconds of a turn of a request that repeats its text of ``length`` from ``start`` on.

    They are those of the fastest turn of each kind, and of the slowest kind: the request gains one token or several,
    has an unread one or none, and ends with tokens that occurred before, or with new ones.
    """
    proposer = student.make(student.config(), spec=EngineSpec(16, 30_000, 4, length + 400, 2**16))
    rng = random.Random(length)
    text = [rng.randrange(60_000) for _ in range(length)]
    req = _Counted(1, np.array(text[: length // 3], np.int32), SamplingParams(max_tokens=length), 1)
    req.output_ids = output = _Read(text[length // 3 :])  # it runs again after a retraction
    req.req_pool_idx = 0
    proposer.admitted(req)
    req.copied, output.read, clock, most = 0, 0, cpu_clock(proposer), proposer.max_drafts

    def turn(run: list[int], unread: int) -> tuple[float, list[int]]:
        req.output_ids.extend(run)
        started = clock()
        proposer.advanced([req], [run])
        (drafts,) = proposer.propose([req], [len(req) + unread], [most])
        spent = clock() - started
        if req.copied:
            gained = "1 token" if len(run) == 1 else f"{len(run)} tokens"
            seen = f"A request of {length:,} tokens gained {gained}, and `req.tokens()` copied {req.copied:,} tokens."
            raise Broken("scan", promise, seen)
        if output.read > length // 4:
            seen = f"A request of {length:,} tokens gained {len(run)}, and {output.read:,} of `output_ids` were read."
            raise Broken("scan", promise, seen)
        output.read = 0
        return spent, list(drafts)

    slowest, at = 0.0, start
    for number, unread in TURNS:
        best = float("inf")
        for i in range(20):
            spent, drafts = turn(text[at : at + number], unread)
            at += number
            if i >= 10:  # by then, the last tokens occurred before, so that drafts are copied
                best = min(best, spent)
        slowest = max(slowest, best)
        follows = text[at + unread : at + unread + most]
        if drafts != follows:
            seen = (
                f"A request of {length:,} tokens repeats its tokens {start:,} to {at - 1:,}. The drafts are "
                f"{_few(drafts)}; expected {_few(follows)}."
            )
            raise Broken("wrong" if drafts else "missed", PROMISE, seen)
    new = [turn([60_000 + i], 0) for i in range(10)]
    if any(drafts for _, drafts in new):
        raise Broken("match", PROMISE, "A request whose last token is new got drafts; expected none.")
    return max(slowest, min(spent for spent, _ in new))


# ---- the engine ----------------------------------------------------------------------------------------------

_CHATS = (
    "Repeat: seven green lamps hang over the long wooden table near the old north door",
    "Repeat: the quick cat sleeps under the warm red stove while rain falls on the roof",
    "Count from 3 to 24.",
    "What is a radix cache?",
)


def run_engine(student: Student) -> str:
    """Compare `tutor`'s answers with and without the student's drafts, greedy and sampled."""
    params = [SamplingParams(max_tokens=40, temperature=t, seed=7) for t in (0.0, 0.9)]
    expected, _ = chat(["num_pages=128", "speculation=none"], _CHATS, params)
    mine = ["num_pages=128", f"plugins={student.path}", *student.lab.words]
    got, stats = student.run(chat, mine, _CHATS, params)
    promise = "The tokens are those of decoding without drafts, greedy and sampled."
    for i, (answer, right) in enumerate(zip(got, expected, strict=True)):
        if answer != right:
            at = next((k for k, (a, b) in enumerate(zip(answer, right, strict=False)) if a != b), len(answer))
            seen = f"Token {at} of the answer to {_CHATS[i % len(_CHATS)]!r} differs."
            raise Broken("promise", promise, seen)
    drafts, accepted = stats["draft_tokens"], stats["accepted_draft_tokens"]
    if not accepted:
        seen = f"Of {drafts} drafts in {stats['steps']} steps, the model accepted none."
        raise Broken("acceptance", "Drafts for answers that repeat the prompt are accepted.", seen)
    return f"{len(got)} answers are equal; {accepted} of {drafts} drafts were accepted"


class _Kit(ProposerConformance):
    """The public kit. The memory that it measures is that of the process in which the proposer is."""

    @staticmethod
    def traced(proposer: DraftProposer) -> AbstractContextManager[Callable[[], int]]:
        """Trace the allocations of the proposer's process."""
        return traced(proposer)


_Kit.__name__ = ProposerConformance.__name__  # the name that the gate prints


def causes(message: str) -> str | None:
    """Return the cause that explains a failure of the conformance kit, or None."""
    found = {
        "its limit is": "limit",
        "asked twice": "again",
        "two proposers returned": "shared",
        "not in the vocabulary": "wrong",
        "not an integer": "wrong",
        "cache_salt=": "other",
        "bytes more are allocated": "leak",
        "runs for": "runs",
        "differ from those": "changes",
    }
    return next((cause for part, cause in found.items() if part in message), None)


GATES = (
    Gate(
        "index",
        "`append` indexes each group that a token follows",
        search(make_text, run_index, tries=60, at_least=20, show=show_text),
        part="draft.index",
    ),
    Gate(
        "copy",
        "`copy` returns what followed the last group",
        search(make_text, run_copy, tries=60, at_least=20, show=show_text),
        part="draft.copy",
        needs=("index",),
    ),
    Gate(
        "turn",
        "requests come, gain tokens, leave and run again, and get the right drafts",
        try_turns,
        part="draft.turn",
        needs=("index",),
    ),
    Gate("acceptance", "enough drafts are right on given texts", run_acceptance),
    Gate("cost", "a turn costs the same after 2,000 and after 300,000 tokens", run_cost),
    conformance(
        lambda: _Kit,
        lambda student, spec: student.make(student.config(), spec=spec),
        causes=causes,
        limit=20.0,
        runs=12,
    ),
    Gate("engine", "tutor's answers do not change with the drafts, greedy or sampled", run_engine, limit=90.0),
    facts(["admitted", "advanced", "propose"]),
)
STRETCH = Stretch(
    "A draft costs as much as a tenth of a step. On texts of the four kinds, `match_tokens=3` has the cost 1.00. Reach "
    f"{MOST_COST:.2f}, with rules of your own that an option `drafting=own` of your file selects. The texts are new in "
    "each run.",
    measure_stretch,
)
