"""``python -m minisgl.testing.soak``: many random schedules on the simulated engine, with every check of `Drive`.

The cache's content is also rebuilt from the KV events and compared after every step.

A schedule is a set of requests with arrivals and aborts on an engine of random size, with a random cache, policy and
options. It depends on its seed alone. The requests are not those of `minisgl.testing.workloads`: prompts are paths in a
tree of prefixes, conversations of several turns in the built-in model's chat format, or copies whose length is at a
page border, and aborts come in bursts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache
from random import Random
from typing import Any

import msgspec

from minisgl.core import EngineSpec, SamplingParams
from minisgl.models.resolve import resolve_model
from minisgl.testing.drive import Drive, Job, Report, make_plugin
from minisgl.testing.kv_events import KVEventsDrive
from minisgl.testing.kv_groups import WindowDrive, random_groups
from minisgl.testing.truth import WITH_DEAD_ENDS, expected_output
from minisgl.tokenizer.tokenizer import Tokenizer

__all__ = ["Totals", "run", "run_all", "short_soak"]

PAGE_SIZES = (1, 3, 16)
POLICIES = ("mixed", "prefill_first", "decode_first", "static", "priority")
QUESTIONS = ("Who are you?", "What is a page?", "How many pages does a request of 100 tokens need?", "Why?", "Thanks!")


@dataclass
class Totals:
    """Sums over the reports of many schedules."""

    schedules: int = 0
    requests: int = 0
    aborted: int = 0
    steps: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    retractions: int = 0
    drafts: int = 0
    accepted_drafts: int = 0
    later_rounds: int = 0
    masks: int = 0
    dead_ends: int = 0
    prompt_logprobs: int = 0

    def add(self, report: Report) -> None:
        """Add the counts of one schedule."""
        counts = report.counts
        self += Totals(
            1,
            len(report.finished),
            sum(reply.finish_reason == "abort" for reply in report.finished.values()),
            counts.steps,
            counts.tokens,
            report.cached_tokens,
            report.stored_blocks,
            report.removed_blocks,
            report.retractions,
            counts.drafts,
            counts.accepted_drafts,
            counts.later_rounds,
            counts.masks,
            sum(reply.finish_reason == "error" for reply in report.finished.values()),
            sum(map(len, report.prompt_logprobs.values())),
        )

    def __iadd__(self, other: Totals) -> Totals:
        for field in fields(Totals):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


def run(seed: int, speculation: str | None = None, windows: bool = False, states: bool = False) -> Report:
    """Run the schedule with this seed. Raise AssertionError if a check fails.

    ``speculation`` is the name of a built-in proposer, whose drafts then take the place of made-up ones. Their number
    follows how many were accepted. With ``windows``, the engine has several KV groups, and there are no drafts. With
    ``states``, each request has a recurrent state.
    """
    random = Random(seed)
    page_size = random.choice(PAGE_SIZES)
    chats = random.random() < 0.25
    num_tokens = random.randrange(150, 400) if chats else random.randrange(20, 160)
    num_pages = max(-(-num_tokens // page_size), 2)
    spec = EngineSpec(
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=random.randrange(1, 9),
        max_seq_len=num_pages * page_size + random.choice([0, 5]),
        vocab_size=len_vocabulary() if chats else random.choice([4, 12, 40]),
    )
    policy = random.choice(POLICIES)
    cache = random.choice(["naive", "radix", "radix"])
    options = {
        "policy": make_plugin("scheduler", policy, **_policy_options(random, policy)),
        "overlap": random.random() < 0.7,
        "max_prefill_tokens": random.choice([1, 3, 8, 50, 8192]),
        "starvation_steps": random.choice([2, 16, 512]),
        "eos_ids": random.choice([(), (), (3,), (1, 2)]),
    }
    drafts = random.choice([None, (1, 50, seed), (4, 80, seed), (9, 95, seed)])
    drive: Drive
    if windows:
        spec = _with_groups(seed, spec, options["max_prefill_tokens"])
        drive = WindowDrive(spec, make_plugin("cache", "groups", spec=spec), **options)
    elif states:
        spec, sizes = replace(spec, has_states=True), Random(f"states {seed}")
        kept = {"snapshots": sizes.choice([1, 2, 5, 30]), "spacing": page_size * sizes.choice([1, 2, 5])}
        cache = sizes.choice(["naive", "radix", "states", "states", "states"])
        arguments = {"spec": spec, **kept} if cache == "states" else {"page_size": page_size}
        drive = Drive(spec, make_plugin("cache", cache, **arguments), **options, drafts=sizes.choice([None, drafts]))
    else:
        drive = KVEventsDrive(
            spec,
            make_plugin("cache", cache, page_size=page_size),
            **options,
            **_speculation(speculation, seed, spec, drafts),
            **_rounds(seed),
        )
    jobs = list(_conversations(random, drive) if chats else _prompts(random, drive))
    if policy == "priority":
        jobs = _with_priorities(random, jobs)
    jobs = _with_dead_ends(seed, jobs)
    report = drive.run(_with_bursts_of_aborts(random, jobs))
    if spec.max_seq_len >= num_pages * page_size:
        drive.check_whole_pool()
    return report


def _with_groups(seed: int, spec: EngineSpec, chunk: int) -> EngineSpec:
    """Return the spec with random KV groups. They have random numbers of their own: the requests are the same."""
    random = Random(f"groups {seed}")
    groups = random_groups(random, spec.page_size, min(chunk, spec.max_seq_len))
    needed = sum(min(spec.num_pages, group.max_pages) for group in groups)
    return replace(spec, num_pages=random.randrange(max(needed // 4, 2), max(needed, 2) + 1), groups=groups)


def _policy_options(random: Random, policy: str) -> dict[str, Any]:
    match policy:
        case "static":
            return {}
        case "priority":
            return {"preempt": random.random() < 0.8}
        case _:
            return {"order": random.choice(["fcfs", "lpm"])}


def _speculation(name: str | None, seed: int, spec: EngineSpec, drafts: tuple[int, int, int] | None) -> dict[str, Any]:
    """Return the arguments of `Drive` for the made-up ``drafts``, or for the proposer ``name``."""
    if name is None:
        return {"drafts": drafts}
    options: dict[str, Any] = {"max_drafts": 1 + seed % 9, "match_tokens": 1 + seed % 2}
    if name == "suffix":
        options["max_tokens"] = (0, 30, 2000)[seed % 3]
    return {"proposer": make_plugin("speculation", name, spec=spec, **options), "adapt_drafts": True}


def _rounds(seed: int) -> dict[str, Any]:
    """Return the arguments of `Drive` for steps of several rounds, in two thirds of the schedules.

    They have random numbers of their own: the requests of a seed are the same with and without rounds.
    """
    random = Random(f"rounds {seed}")
    rounds = random.choice([1, 2, 5])
    return {"rounds": rounds, "full_drafts": rounds > 1 and random.random() < 0.7}


# ---- the requests ------------------------------------------------------------------------------------------


def _params(random: Random, vocab_size: int, longest: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=random.randrange(1, max(min(longest, random.choice([3, 20, 60])), 1) + 1),
        temperature=random.choice([0.0, 1.0]),
        seed=random.choice([None, 0, 7]),
        stop_token_ids=random.choice([(), (), (0,), (vocab_size - 1,)]),
        ignore_eos=random.random() < 0.5,
        presence_penalty=random.choice([0.0, 0.0, 0.5]),
        logprobs=random.choice([None, None, 0]),
        prompt_logprobs=random.choice([None, None, None, 0]),
        logprob_start_len=random.choice([0, 0, 7, 40]),
        cache_salt=random.choice([None, None, None, "a", "b"]),
    )


def _prompts(random: Random, drive: Drive) -> Iterable[Job]:
    """Yield requests whose prompts are paths in a tree, copies with a length at a page border, or later turns.

    The prompt of a later turn is the prompt and the answer of an earlier request, and a few tokens more.
    """
    spec = drive.spec
    room = min(spec.max_seq_len, spec.num_pages * spec.page_size)
    tokens = min(spec.vocab_size, 3)
    tree: list[list[int]] = [[]]
    for _ in range(random.randrange(1, 8)):
        tree.append([*random.choice(tree), *random.choices(range(tokens), k=random.randrange(1, room // 2 + 2))])
    pages = random.randrange(1, max(room // spec.page_size // 2, 1) + 1)
    copy = random.choices(range(tokens), k=max(pages * spec.page_size + random.choice([-1, 0, 0, 1]), 1))
    jobs: list[Job] = []
    for uid in range(1, random.randrange(2, 16)):
        arrive, kind = random.choice([0, 0, 0, 3, 8, 30]), random.random()
        if kind < 0.35:
            prompt = copy
        elif kind < 0.65 or not jobs:
            prompt = [*random.choice(tree), *random.choices(range(tokens), k=random.randrange(1, 9))]
        else:
            earlier = random.choice(jobs)
            answer = expected_output(earlier.request, spec.vocab_size, drive.eos_ids).tokens
            prompt = [*earlier.prompt, *answer, *random.choices(range(tokens), k=random.randrange(1, 4))]
            arrive = earlier.arrive + random.randrange(2, 30)
        prompt = prompt[: max(room - 1, 1)]
        params = _params(random, spec.vocab_size, room - len(prompt) if random.random() < 0.9 else room)
        jobs.append(Job(uid, prompt, params, arrive, grammar=random.choice([None, None, 0, 1])))
    return jobs


def _conversations(random: Random, drive: Drive) -> Iterable[Job]:
    """Yield the turns of a few conversations: the prompt of a turn contains the turn before and its answer."""
    spec = drive.spec
    room = min(spec.max_seq_len, spec.num_pages * spec.page_size)
    uid = 0
    for _ in range(random.randrange(1, 4)):
        prompt, arrive = opening(), random.randrange(10)
        for _ in range(random.randrange(1, 5)):
            prompt = [*prompt, *question(random.choice(QUESTIONS))]
            params = _params(random, spec.vocab_size, 30)
            if len(prompt) + params.max_tokens > room:
                break
            uid += 1
            job = Job(uid, prompt, params, arrive, grammar=random.choice([None, None, 1]))
            yield job
            prompt = [*prompt, *expected_output(job.request, spec.vocab_size, drive.eos_ids).tokens]
            arrive += random.randrange(5, 40)


def _with_priorities(random: Random, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with random priorities, of which many are equal."""
    choices = [*random.choices([-(2**31), -7, -1, 0, 1, 2, 2**31 - 1], k=random.randrange(1, 5)), 0]
    return [replace(job, params=msgspec.structs.replace(job.params, priority=random.choice(choices))) for job in jobs]


def _with_dead_ends(seed: int, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs, of which some of those with a grammar get one that may end them with an error.

    They have random numbers of their own: the requests of a seed are otherwise the same.
    """
    random = Random(f"dead ends {seed}")
    some = random.choice([0.0, 0.0, 0.5])
    return [replace(j, grammar=WITH_DEAD_ENDS) if j.grammar and random.random() < some else j for j in jobs]


def _with_bursts_of_aborts(random: Random, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs, of which some are aborted, several at the same step."""
    steps = [random.randrange(40) for _ in range(random.choice([0, 0, 1, 2]))]
    return [
        Job(job.uid, job.prompt, job.params, job.arrive, max(random.choice(steps), job.arrive), job.grammar)
        if steps and random.random() < 0.5
        else job
        for job in jobs
    ]


@cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_dir(resolve_model("tutor"))
    assert tokenizer is not None
    return tokenizer


@cache
def len_vocabulary() -> int:
    """Return the number of tokens in the vocabulary of the built-in model."""
    return max(max(opening()), *(max(question(text)) for text in QUESTIONS)) + 1


@cache
def opening() -> list[int]:
    """Return the tokens with which every conversation begins."""
    whole = _tokenizer().chat([{"role": "system", "content": "Answer in one sentence."}])
    return whole[: max(len(whole) - 1, 1)]


@cache
def question(text: str) -> list[int]:
    """Return the tokens of a user's message."""
    return _tokenizer().chat([{"role": "user", "content": text}])


# ---- many schedules ------------------------------------------------------------------------------------------


def run_all(
    seeds: Sequence[int], speculation: str | None = None, windows: bool = False, states: bool = False
) -> tuple[Totals, list[tuple[int, str]]]:
    """Run the schedules with these seeds. Return the totals, and (seed, error) of each schedule that failed.

    ``speculation``, ``windows`` and ``states`` are those of `run`.
    """
    totals, failed = Totals(), []
    for seed in seeds:
        try:
            totals.add(run(seed, speculation, windows, states))
        except Exception as error:  # every kind of failure is reported with its seed
            failed.append((seed, f"{type(error).__name__}: {error}"))
    return totals, failed


def short_soak(speculation: str | None = None) -> list[int]:
    """Return the seeds of the schedules that the tests run: 500, of which each proposer serves one half.

    Neighbours share a half, so that each half has every remainder of 2, 3 and 9, on which a proposer's options depend.
    Both serve the last 20: among these is the only schedule in which a rare bug shows with a proposer's drafts.
    """
    half = ("ngram", "suffix").index(speculation) if speculation else None
    return [seed for seed in range(500) if half is None or seed // 2 % 2 == half or seed >= 480]


def main(argv: Sequence[str]) -> int:
    """Run the program and return its exit status: 1 if a schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.testing.soak", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000, help="number of schedules (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule (default 0)")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the work (default 2)")
    parser.add_argument("--speculation", choices=["ngram", "suffix"], help="a proposer (default: made-up drafts)")
    parser.add_argument("--windows", action="store_true", help="several KV groups, with cache=groups")
    parser.add_argument("--states", action="store_true", help="a recurrent state for each request")
    args = parser.parse_args(argv)
    began = time.monotonic()
    seeds = range(args.seed, args.seed + args.schedules)
    blocks = [seeds[i : i + 50] for i in range(0, len(seeds), 50)]
    totals, failed = Totals(), list[tuple[int, str]]()
    with ProcessPoolExecutor(args.processes) as pool:
        options = ([option] * len(blocks) for option in (args.speculation, args.windows, args.states))
        for part, errors in pool.map(run_all, blocks, *options):
            totals += part
            failed += errors
            for seed, text in errors:
                print(f"seed {seed}: {text}", flush=True)
    for field in fields(Totals):
        print(f"{field.name:>16} {getattr(totals, field.name):>12,}")
    print(f"{len(failed)} failed; {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
