"""What the load generator sends, and when: arrival times, trace files, prompts with common prefixes, options."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from minisgl.bench.loadgen.arrivals import arrival_times, replay_times
from minisgl.bench.loadgen.options import NAMED, OnlineOptions, ReplayOptions, describe, read_options
from minisgl.bench.loadgen.prompts import PromptFactory, RandomWorkload, TraceWorkload, Vocabulary
from minisgl.bench.loadgen.traces import HASH_BLOCK, TraceRequest, read_trace, with_tokenizer, within
from minisgl.bench.loadgen.vocabulary import find_tokenizer, vocabulary
from minisgl.config import ConfigError

# ---- arrival times -----------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_gamma_distribution(burstiness: float) -> None:
    """Their mean is 1/rate and their squared coefficient of variation 1/burstiness."""
    times = arrival_times(40_000, 8.0, burstiness, seed=3)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    assert times[-1] == pytest.approx(40_000 / 8)
    assert gaps.mean() == pytest.approx(1 / 8)
    assert gaps.var() * 8**2 == pytest.approx(1 / burstiness, rel=0.05)


def test_poisson_counts_and_gaps() -> None:
    """The number of arrivals in a second has mean and variance 8; gaps are exponential."""
    times = arrival_times(40_000, 8.0, seed=5)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(8, rel=0.02)
    assert counts.var() == pytest.approx(8, rel=0.1)
    gaps = np.diff(times)
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(gaps, share) == pytest.approx(-math.log(1 - share) / 8, rel=0.05)


def test_arrival_times_depend_on_the_seed_only() -> None:
    assert (arrival_times(50, 2.0, 0.5, seed=1) == arrival_times(50, 2.0, 0.5, seed=1)).all()
    assert (arrival_times(50, 2.0, 0.5, seed=1) != arrival_times(50, 2.0, 0.5, seed=2)).any()
    assert arrival_times(4, 2.0, math.inf).tolist() == [0.5, 1.0, 1.5, 2.0]
    assert arrival_times(3, math.inf).tolist() == [0, 0, 0]
    assert len(arrival_times(0, 2.0)) == 0


def test_speed_scales_the_times_of_a_trace() -> None:
    stamps = np.array([10.0, 10.5, 14.0])
    assert replay_times(stamps).tolist() == [0, 0.5, 4]
    assert replay_times(stamps, 4.0).tolist() == [0, 0.125, 1]
    assert replay_times(stamps, 0.5).tolist() == [0, 1, 8]
    assert len(replay_times(np.array([]))) == 0


# ---- trace files -------------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,0
2023-11-16 18:15:47,20,3
"""
MOONCAKE = """{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}

{"timestamp": 2500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]}
"""
SHARE_GPT = [
    {"conversations": [{"from": "human", "value": "one two three four"}, {"from": "gpt", "value": "a b c d e"}]},
    {"conversations": [{"from": "human", "value": "no answer follows here"}]},
    {"conversations": [{"from": "human", "value": "short"}, {"from": "gpt", "value": "a b c d"}]},
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_azure_csv(tmp_path: Path, packed: bool) -> None:
    file = tmp_path / "any.name"
    file.write_bytes(gzip.compress(AZURE.encode()) if packed else AZURE.encode())
    first, second, third = read_trace(file)
    assert first.timestamp is not None and second.timestamp is not None and third.timestamp is not None
    assert [(r.input_len, r.output_len) for r in (first, second, third)] == [(374, 44), (20, 3), (396, 1)]
    assert second.timestamp - first.timestamp == pytest.approx(0.31941, abs=1e-6)
    assert third.timestamp - first.timestamp == pytest.approx(4.314579, abs=1e-6)
    assert first.timestamp == pytest.approx(1_700_158_546.680590, abs=1e-6)


def test_azure_csv_of_2024(tmp_path: Path) -> None:
    """Its times name UTC, and have no fraction in a full second."""
    file = tmp_path / "trace.csv"
    stamps = ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00")
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{stamp},5,6\n" for stamp in stamps))
    first, second = (request.timestamp for request in read_trace(file))
    assert first is not None and second is not None
    assert second - first == pytest.approx(0.99007, abs=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake_json_lines(tmp_path: Path, packed: bool) -> None:
    file = tmp_path / "trace"
    file.write_bytes(gzip.compress(MOONCAKE.encode()) if packed else MOONCAKE.encode())
    assert read_trace(file) == [TraceRequest(0.0, 700, 5, (0, 1)), TraceRequest(2.5, 1024, 7, (0, 2))]


def test_share_gpt_json(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(SHARE_GPT))
    found = read_trace(file, default_output=9)
    assert [(r.prompt, r.output_len, r.timestamp) for r in found] == [
        ("one two three four", 9, None),
        ("short", 9, None),
    ]

    def encode(text: str) -> list[int]:
        return [len(word) for word in text.split()]

    (ids,) = with_tokenizer(found, encode, as_ids=True)
    assert (ids.prompt, ids.input_len, ids.output_len) == ((3, 3, 5, 4), 4, 5)
    (text,) = with_tokenizer(found, encode, as_ids=False)
    assert (text.prompt, text.input_len, text.output_len) == ("one two three four", 4, 5)
    assert within([ids], 8) == []
    assert within([ids], 9) == [ids]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a,b\n1,2\n", "the format is not known"),
        (AZURE.encode() + b"2023-11-16 18:15,x,3\n", ":5 is not a request"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,3\n", ":2 is not a request"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
        (b'{"timestamp": 0}\n', ":1 is not a request"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', ":1 is not a request"),
        (b"{\n", ":1 is not a request"),
        (b'[{"conversation": []}]', "is not a list of"),
        (b"[]", "has no request"),
        (b"\x1f\x8bnothing", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_wrong_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "trace"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(file)


def test_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nowhere")


# ---- prompts -----------------------------------------------------------------------------------------


def ids_of(factory: PromptFactory, index: int, request: TraceRequest) -> list[int]:
    prompt = factory.build(index, request)
    assert isinstance(prompt, list)
    return prompt


def test_equal_hash_ids_are_equal_prefixes() -> None:
    factory = PromptFactory(Vocabulary(np.arange(1000)), seed=1)
    a = ids_of(factory, 0, TraceRequest(0.0, 1400, 1, (7, 8, 9)))
    b = ids_of(factory, 1, TraceRequest(1.0, 1536, 1, (7, 8, 10)))
    c = ids_of(factory, 2, TraceRequest(1.0, 600, 1, (8, 7)))
    assert [len(prompt) for prompt in (a, b, c)] == [1400, 1536, 600]
    assert a[: 2 * HASH_BLOCK] == b[: 2 * HASH_BLOCK]
    assert a[2 * HASH_BLOCK :] != b[2 * HASH_BLOCK : 1400]
    assert c[:HASH_BLOCK] == a[HASH_BLOCK : 2 * HASH_BLOCK], "equal ids are equal blocks"
    assert c[HASH_BLOCK:] == a[: 600 - HASH_BLOCK]
    other = ids_of(PromptFactory(factory.vocabulary, seed=2), 0, TraceRequest(0.0, 1400, 1, (7, 8, 9)))
    assert a[:HASH_BLOCK] != other[:HASH_BLOCK]


def test_tokens_behind_the_last_hash_id_are_the_request_s_own() -> None:
    factory = PromptFactory(Vocabulary(np.arange(1000)), seed=1)
    a, b = (ids_of(factory, i, TraceRequest(0.0, 520, 1, (4,))) for i in (0, 1))
    assert a[:HASH_BLOCK] == b[:HASH_BLOCK]
    assert len(a) == len(b) == 520
    assert a[HASH_BLOCK:] != b[HASH_BLOCK:]


def test_shared_prefix_and_new_rest() -> None:
    factory = PromptFactory(Vocabulary(np.arange(5, 1000)), seed=1, shared=40)
    prompts = [ids_of(factory, i, TraceRequest(None, 60, 1)) for i in range(20)]
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 1
    assert len({tuple(prompt[40:56]) for prompt in prompts}) == 20
    assert min(min(prompt) for prompt in prompts) >= 5
    assert ids_of(factory, 3, TraceRequest(None, 60, 1)) == prompts[3]


def test_lengths_are_uniform_in_their_ranges() -> None:
    workload = RandomWorkload(None, (100, 1024), (3, 5), seed=4)
    requests = [workload.request(i) for i in range(3000)]
    inputs = np.array([r.input_len for r in requests])
    assert inputs.min() >= 100 and inputs.max() <= 1024
    assert inputs.mean() == pytest.approx(562, rel=0.03)
    assert {r.output_len for r in requests} == {3, 4, 5}
    assert workload.request(17) == requests[17]
    trace = TraceWorkload([TraceRequest(0.0, 1, 2)])
    assert (trace.count, trace.request(0)) == (1, TraceRequest(0.0, 1, 2))


def test_vocabularies() -> None:
    """Ids leave out special tokens; text consists of words that keep their number of tokens beside each other."""
    tutor = find_tokenizer(None, "tutor")
    assert tutor is not None
    ids = vocabulary(tutor, None, text=False).ids
    special = [i for i, token in tutor.raw.get_added_tokens_decoder().items() if token.special]
    assert special and not set(special) & set(ids.tolist())
    assert len(ids) == tutor.vocab_size - len(special)
    factory = PromptFactory(vocabulary(tutor, None, text=True), seed=0)
    for length in (1, 7, 300):
        text = factory.build(length, TraceRequest(None, length, 1))
        assert isinstance(text, str)
        assert len(tutor.encode(text, add_special_tokens=False)) == length
    assert vocabulary(tutor, 77, text=False).ids.tolist() == list(range(77))
    assert vocabulary(None, None, text=True).words
    with pytest.raises(ConfigError, match="give tokenizer="):
        vocabulary(None, None, text=False)
    with pytest.raises(ConfigError, match="no directory with a tokenizer"):
        find_tokenizer("nowhere", "tutor")
    assert find_tokenizer(None, "some/model") is None


# ---- options -----------------------------------------------------------------------------------------


def test_named_workloads() -> None:
    clients = read_options(OnlineOptions, ["workload=64-clients"])
    assert (clients.input, clients.output, clients.points, clients.clients) == ("512", "256", [64.0], "64")
    burst = read_options(OnlineOptions, ["workload=256-at-once", "requests=8"])
    assert (burst.points, burst.requests, burst.input, burst.output) == ([math.inf], 8, "100:1024", "100:1024")
    rate = read_options(OnlineOptions, ["workload=60-per-second"])
    assert (rate.points, rate.input, rate.output) == ([60.0], "512", "128")
    assert set(NAMED) == {"64-clients", "256-at-once", "60-per-second"}
    changed = read_options(OnlineOptions, ["workload=64-clients", "rate=3"])
    assert (changed.points, changed.clients, changed.input) == ([3.0], None, "512")
    longer = read_options(OnlineOptions, ["workload=64-clients", "duration=5"])
    assert (longer.requests, longer.duration, longer.clients) == (None, 5.0, "64")


def test_options_have_types_and_defaults() -> None:
    options = read_options(
        OnlineOptions,
        [
            "rate=1,2.5,inf",
            "burstiness=inf",
            "ignore_eos=false",
            "goodput=ttft:200,tpot:50",
            "model=null",
            "endpoint=chat",
        ],
    )
    assert options.points == [1, 2.5, math.inf]
    assert options.burstiness == math.inf
    assert not options.ignore_eos and options.model is None and options.text_prompts
    assert options.limits == {"ttft": 200, "tpot": 50}
    assert not read_options(OnlineOptions, []).text_prompts
    assert read_options(ReplayOptions, ["trace=x", "speed=[1,4]"]).points == [1, 4]
    assert "burstiness=1.0" in describe(OnlineOptions) and "workload=64-clients" in describe(OnlineOptions)
    assert "workload" not in describe(ReplayOptions)


@pytest.mark.parametrize(
    ("schema", "words", "message"),
    [
        (OnlineOptions, ["rat=3"], "there is no option 'rat'. Did you mean rate"),
        (OnlineOptions, ["rate"], "'rate' is not an option"),
        (OnlineOptions, ["rate=0"], "rate must be a number above 0"),
        (OnlineOptions, ["rate=x"], "rate must be a number above 0"),
        (OnlineOptions, ["clients=2.5"], "clients must be whole numbers"),
        (OnlineOptions, ["clients=inf"], "clients must be"),
        (OnlineOptions, ["rate=1", "clients=2"], "exclude each other"),
        (OnlineOptions, ["requests=0"], "requests must be at least 1"),
        (OnlineOptions, ["requests=many"], "requests=many"),
        (OnlineOptions, ["input=5:3"], "is not a range"),
        (OnlineOptions, ["burstiness=0"], "burstiness must be above 0"),
        (OnlineOptions, ["goodput=ttft"], "is not a limit"),
        (OnlineOptions, ["goodput=latency:3"], "is not a limit"),
        (OnlineOptions, ["goodput=ttft:-1"], "is not a limit"),
        (OnlineOptions, ["workload=65-clients"], "there is no such workload"),
        (OnlineOptions, ["url=localhost:1919"], "url must begin with"),
        (OnlineOptions, ["endpoint=responses"], "endpoint must be"),
        (OnlineOptions, ["endpoint=chat", "prompts=ids"], "a chat takes text"),
        (OnlineOptions, ["duration=5"], "duration= needs"),
        (OnlineOptions, ["duration=5", "rate=2", "requests=3"], "duration= needs"),
        (OnlineOptions, ["duration=0", "clients=2"], "duration must be"),
        (OnlineOptions, ["timeout=inf"], "timeout must be"),
        (OnlineOptions, ["seed=-1"], "seed must be"),
        (OnlineOptions, ["temperature=-1"], "temperature must be"),
        (ReplayOptions, [], "trace must be"),
        (ReplayOptions, ["trace=x", "rate=3"], "there is no option 'rate'"),
        (ReplayOptions, ["trace=x", "speed=inf"], "speed must be finite"),
    ],
)
def test_wrong_options_are_refused(
    schema: type[OnlineOptions] | type[ReplayOptions], words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(schema, words)
