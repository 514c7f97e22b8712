"""Every example plugin of the hooks page runs, and observes or builds what it claims."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import APIRouter, FastAPI
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from minisgl import LLM, SamplingParams
from minisgl.chapters.site.reference import EXAMPLES
from minisgl.cluster.options import ClusterConfig
from minisgl.cluster.router import Router
from minisgl.cluster.routing import Replica
from minisgl.cluster.status import ClusterStatus, ReplicaStatus
from minisgl.config import GROUPS, Config, ConfigError
from minisgl.models.resolve import resolve_model
from minisgl.plugin_manager.discovery import HOOKS
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.external.parts import PARTS
from minisgl.plugins.http import HttpConfig
from minisgl.plugins.http.apis.answer import CallArguments, CallBegin, Content, PlainReader, Reasoning
from minisgl.plugins.quantization.e4m3.matrix import Fp8Matrix
from minisgl.plugins.reasoning_parser import ReasoningParser
from minisgl.plugins.tool_parser import ToolParser
from minisgl.sampling_params import Grammar, InvalidRequestError
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.serving import Server
from minisgl.testing.small import SPEC, job, no_lookahead, pool
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.trace.read import read

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["Count from 5 to 9.", "What is a radix cache, and which requests does it help?"]
CLIENTS = [job(uid, 9 + uid, 12, first=uid % 2, abort=6 if uid == 3 else None) for uid in range(1, 7)]
"""Six requests with two different prefixes. Request 3 is aborted."""


def example(name: str) -> Path:
    """Return the file of the example of a hook, or of a group of parts."""
    return EXAMPLES.parent / ("parts" if name in PARTS else "hooks") / f"{name}.py"


def load(name: str) -> PluginManager:
    """Return a plugin manager that has loaded the example of a hook or a group, besides the built-in plugins."""
    manager = PluginManager.load([str(example(name))])
    (plugin,) = (plugin for plugin in manager.plugins if plugin.source == "file")
    assert name in plugin.hooks or name in [group for group, _, _ in plugin.options]
    return manager


def observer_of(manager: PluginManager) -> Any:
    """Return the object of the example's class that the plugin manager made."""
    (module,) = (plugin.name for plugin in manager.plugins if plugin.source == "file")
    (observer,) = [p for p in manager._manager.get_plugins() if type(p).__module__ == module]
    return observer


def simulate(manager: PluginManager, tmp_path: Path, clients: list[Job] = CLIENTS, **options: Any) -> Drive:
    """Run ``clients`` on the simulated engine, by default in a KV pool so small that it evicts and retracts.

    The trace of the run is ``run.jsonl`` in ``tmp_path``. ``options`` are ``spec``, ``cache``, ``policy`` and those of
    `Drive`.
    """
    spec = options.pop("spec", pool(12))
    config = Config(trace=str(tmp_path / "run.jsonl"), page_size=spec.page_size)
    manager.observe(config, spec)
    cache = options.pop("cache", None) or make_plugin("cache", "radix", page_size=spec.page_size)
    policy = options.pop("policy", None) or make_plugin("scheduler", "mixed")
    with no_lookahead():
        drive = Drive(spec, cache, policy, observers=manager.hook, thorough=False, **options)
        drive.run(clients)
    manager.close()
    return drive


def events(tmp_path: Path, kind: str) -> list[Any]:
    """Return the events of one kind in the trace of the run."""
    return [event for event in read(tmp_path / "run.jsonl").events if type(event).__name__ == kind]


@contextmanager
def llm(name: str, *words: str, model: str = "tutor") -> Iterator[LLM]:
    """Load a tiny model on the CPU, with the example of a hook or a group and the options ``words``."""
    overrides = ["device=cpu", "num_pages=64", f"plugins={example(name)}", *words]
    with LLM(model, overrides=overrides) as engine:
        yield engine


def tokens(engine: LLM, prompts: list[str] = PROMPTS) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the tokens of the prompts without any example plugin."""
    with LLM("tutor", overrides=["device=cpu", "num_pages=64"]) as engine:
        return tokens(engine)


def test_every_hook_and_group_has_an_example() -> None:
    examples = {path.stem for folder in ("hooks", "parts") for path in (EXAMPLES.parent / folder).glob("*.py")}
    assert examples == {*HOOKS, *PARTS}
    assert {f"test_{name}" for name in examples} <= set(globals())


def test_every_group_is_described() -> None:
    assert set(PARTS) == set(GROUPS)


# ---- parts ---------------------------------------------------------------------------------------


def test_minisgl_configs(tmp_path: Path) -> None:
    manager = load("minisgl_configs")
    config = manager.make("scheduler", "capped")
    assert config.limit == 8
    with pytest.raises(ValueError, match="limit must be at least 1"):
        type(config)(limit=0)
    policy = manager.build("scheduler", type(config)(limit=2))
    drive = simulate(manager, tmp_path, policy=policy, spec=SPEC)
    assert drive.report.counts.max_rows == 2
    assert simulate(load("minisgl_configs"), tmp_path, spec=SPEC).report.counts.max_rows == 4


def test_attention(expected: list[list[int]]) -> None:
    with llm("attention", "attention=profiled", "attention.backend=torch") as engine:
        assert tokens(engine) == expected
        stats, backend = engine.scheduler.stats(), engine.engine.attention  # type: ignore[union-attr]
    assert backend.steps == stats["steps"] > 0
    assert backend.query_tokens == stats["prefill_tokens"] + stats["decode_tokens"]


def test_minisgl_find_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", str(tmp_path))
    (tmp_path / "small").mkdir()
    find = load("minisgl_find_model").hook.minisgl_find_model
    assert find(name="@small") == tmp_path / "small"
    assert find(name="small") is None
    with pytest.raises(ConfigError, match="model=@big: there is no directory"):
        find(name="@big")


def test_minisgl_read_config(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    with llm("minisgl_read_config", model=str(path)) as engine:
        expected = engine.generate([[5, 6, 7]], GREEDY)[0].token_ids
    file = path / "config.json"
    old = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer"}
    raw = {old.get(name, name): value for name, value in json.loads(file.read_text()).items()}
    file.write_text(json.dumps({**raw, "architectures": ["OldLlama"]}))
    with llm("minisgl_read_config", model=str(path)) as engine:
        assert engine.generate([[5, 6, 7]], GREEDY)[0].token_ids == expected
    with pytest.raises(ConfigError, match="hidden_size must be"), llm("minisgl_check_model", model=str(path)):
        pass


def test_minisgl_check_model() -> None:
    refusal = "tutor can't be built: this machine must not serve models of this type"
    with pytest.raises(ConfigError, match=refusal), llm("minisgl_check_model"):
        pass


def test_minisgl_convert_model() -> None:
    with llm("minisgl_convert_model") as engine:
        weight = engine.engine.model.get_parameter("layers.0.self_attn.o_proj.weight")  # type: ignore[union-attr]
        assert all(len(row.unique()) <= 255 for row in weight)


def test_minisgl_wrap_policy(expected: list[list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    with llm("minisgl_wrap_policy") as engine:
        assert tokens(engine) == expected
        guard: Any = engine.scheduler.planner.policy
        assert (type(guard).__name__, type(guard.policy).__name__) == ("StarvationGuard", "LoggedPolicy")
        assert guard.policy.plans >= engine.scheduler.stats()["steps"] > 0
    assert "plan 1: 2 rows, " in capsys.readouterr().out


def test_minisgl_cache_manager(expected: list[list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    with llm("minisgl_cache_manager", "page_size=4") as engine:
        assert tokens(engine) == tokens(engine) == expected
    admitted = re.findall(r"step \d+: (\d+) of (\d+) pages", capsys.readouterr().out)
    assert [cached == "0" for cached, _ in admitted] == [True, True, False, False]


def test_minisgl_wrap_constraint() -> None:
    with llm("minisgl_wrap_constraint") as engine:
        chat = [{"role": "user", "content": PROMPTS[0]}]
        (free,) = engine.chat(chat, GREEDY)
        grammar = Grammar("regex", "[0-9]|[a-z]{2}")
        (word,) = engine.chat(chat, SamplingParams(temperature=0.0, grammar=grammar))
    assert len(free.token_ids) == 12
    assert not any(character.isdigit() for character in free.text)
    assert word.text.isalpha()


def test_minisgl_start_ranks(expected: list[list[int]], capfd: pytest.CaptureFixture[str]) -> None:
    with llm("minisgl_start_ranks", "tp=2") as engine:
        assert tokens(engine) == expected
    assert capfd.readouterr().out.count("starting 2 ranks on ") == 1


def test_minisgl_wrap_runner(expected: list[list[int]]) -> None:
    with llm("minisgl_wrap_runner") as engine:
        assert tokens(engine) == expected
        assert engine.engine.runner.checked_steps == engine.scheduler.stats()["steps"] > 0  # type: ignore[union-attr]
        with torch.inference_mode():
            next(engine.engine.model.parameters()).fill_(torch.nan)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="logits that are not numbers"):
            tokens(engine)


def test_speculation(expected: list[list[int]]) -> None:
    """The second answer to a prompt has the same tokens, and most of them were drafted."""
    with llm("speculation", "speculation=again", "speculation.max_answers=2") as engine:
        first = tokens(engine)
        assert engine.scheduler.stats()["draft_tokens"] == 0
        engine.scheduler.speculation.adapt = False  # type: ignore[union-attr]
        assert first == tokens(engine) == expected
        assert engine.scheduler.stats()["accepted_draft_tokens"] > 8
        tokens(engine, ["Hello.", "What is a page?"])
        assert len(engine.scheduler.speculation.proposer.answers) == 2  # type: ignore[union-attr]


def test_kernels(expected: list[list[int]]) -> None:
    with llm("kernels", "kernels=double") as engine:
        assert tokens(engine) == expected
        kinds = {type(module).__name__ for module in engine.engine.model.modules()}
    assert "DoubleNorm" in kinds and "RMSNorm" not in kinds


def test_quantization(tmp_path: Path) -> None:
    """A checkpoint of half the weights gives the tokens of the checkpoint with all of them."""
    path, ids = tiny_checkpoint("llama", tmp_path), list(range(5, 25))
    answers = []
    for method in (None, "halves"):
        if method is not None:
            stored = load_file(path / "model.safetensors")
            save_file({name: tensor / 2 for name, tensor in stored.items()}, path / "model.safetensors")
            raw = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": method}}))
        with llm("quantization", model=str(path)) as engine:
            answers.append(engine.generate([ids], GREEDY)[0].token_ids)
    assert answers[0] == answers[1]


def test_fp8_gemm() -> None:
    """Every matrix of tutor's layers is multiplied by the example's product, and by no other."""
    with llm("fp8_gemm", "quantize=fp8", "fp8_gemm=timed", "fp8_gemm.backend=torch") as engine:
        texts = tokens(engine)
        matrices = [module for module in engine.engine.model.modules() if isinstance(module, Fp8Matrix)]
        gemm: Any = matrices[0].fp8.gemm
        assert set(gemm.seconds) == {(512, 256), (256, 256), (1024, 256), (256, 512)}
        assert all(seconds > 0 for seconds in gemm.seconds.values())
    with LLM("tutor", overrides=["device=cpu", "num_pages=64", "quantize=fp8"]) as engine:
        assert tokens(engine) == texts


def test_cache(tmp_path: Path) -> None:
    """Two rounds of one prompt of 20 tokens: with ``max_pages`` 2, only 2 of its 5 pages are found again."""
    found = {}
    for max_pages in (2, 16):
        manager = load("cache")
        config = manager.make("cache", "system_prompts")
        config.max_pages = max_pages
        cache = manager.build("cache", config, page_size=4)
        clients = [job(1, 21, 4, first=1), job(2, 21, 4, first=1, arrive=20)]
        drive = simulate(manager, tmp_path, clients, cache=cache, spec=SPEC)
        found[max_pages] = drive.report.finished[2].cached_tokens
    assert found == {2: 8, 16: 20}


def test_scheduler(tmp_path: Path) -> None:
    manager = load("scheduler")
    policy = manager.build("scheduler", manager.make("scheduler", "shortest"))
    clients = [job(uid, length, 4, first=uid) for uid, length in ((1, 30), (2, 20), (3, 10))]
    drive = simulate(manager, tmp_path, clients, policy=policy, spec=SPEC, max_prefill_tokens=10)
    first = drive.report.first_token
    assert first[3] < first[2] < first[1]


def test_routing() -> None:
    """Prompts with the same first block go to one replica; the others follow the load."""
    manager = load("routing")
    policy = manager.build("routing", manager.make("routing", "by_prompt"))
    replicas = [Replica(block_size=4) for _ in range(4)]
    assert [policy.choose([block, 7], 8, replicas) for block in (5, 5, 6, 11)] == [1, 1, 2, 3]
    replicas[0].start("a", [], 3, 1)
    replicas[1].stop()
    assert policy.choose([], 3, replicas) == 2
    assert policy.choose([5], 8, replicas) == 3  # the third of the living replicas


def test_tokenizer() -> None:
    """Each chat begins with the system message, and the stream has no thoughts."""
    given = {"path": resolve_model("tutor"), "parse_special_tokens": False}
    manager = load("tokenizer")
    plain: Tokenizer = manager.build("tokenizer", manager.make("tokenizer", "plain"), **given)
    briefed: Tokenizer = manager.build("tokenizer", manager.make("tokenizer", "briefed"), **given)
    user = {"role": "user", "content": "Why?"}
    system = {"role": "system", "content": "Answer in one sentence."}
    assert briefed.chat([user]) == plain.chat([system, user]) == briefed.chat([system, user])
    stream = briefed.stream([], SamplingParams())
    assert "".join(map(stream.feed, plain.encode("Hm, so.</think>Yes"))) + stream.flush() == "Yes"
    stream = briefed.stream([], SamplingParams())
    assert "".join(map(stream.feed, plain.encode("Yes, it is."))) + stream.flush() == "Yes, it is."


def test_grammar() -> None:
    choices = SamplingParams(max_tokens=9, temperature=1.0, grammar=Grammar("choice", '["a", "c"]'))
    with llm("grammar", "grammar=letters") as engine:
        answers = engine.generate(["Which?"] * 8, choices, progress=False)
        assert {answer.text for answer in answers} <= {"a", "c"}
        assert {answer.finish_reason for answer in answers} == {"stop"}
        longer = Grammar("choice", '["ab"]')
        with pytest.raises(InvalidRequestError, match="choices of one letter only"):
            engine.generate(["Which?"], SamplingParams(grammar=longer), progress=False)


def test_tool_parser() -> None:
    manager = load("tool_parser")
    parser: ToolParser = manager.build("tool_parser", manager.make("tool_parser", "lines"), template="")
    reader = parser.reader({"f"}, 1, False)
    texts = ("So:\nCALL f {", '"a": 1}\nCALL f {}\nCALL g {}\n', "CALL f x")
    parts = [part for text in texts for part in reader.feed(text)]
    begin = parts[1]
    assert isinstance(begin, CallBegin)
    assert [*parts, *reader.finish()] == [
        Content("So:\n"),
        CallBegin(0, begin.id, "f"),
        CallArguments(0, '{"a": 1}'),
        Content("CALL g {}\n"),
        Content("CALL f x"),
    ]
    assert parser.frame([("f", {"type": "object"})], 1) == {
        "any_of": [["CALL f ", {"json_schema": {"type": "object"}}, "\n"]]
    }


def test_reasoning_parser() -> None:
    manager = load("reasoning_parser")
    parser: ReasoningParser = manager.build("reasoning_parser", manager.make("reasoning_parser", "final"), template="")
    reader = parser.reader(parser.is_open(""), PlainReader())
    parts = [part for text in ("Hm. Ans", "wer: Yes", ".") for part in reader.feed(text)] + reader.finish()
    assert parts == [Reasoning("Hm. "), Content(" Yes"), Content(".")]
    cut = parser.reader(True, PlainReader())
    assert cut.feed("Hm") + cut.finish() == [Reasoning("Hm")]


def test_live() -> None:
    """The observer counts steps, and the extension answers with their number."""
    with Server("model=tutor", f"plugins=[{example('live')}]", "live=counter", "live.every=3") as server:
        body = {"model": "tutor", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 200  # its answer comes after the last message
        steps = httpx.get(f"{server.url}/steps").json()["steps"]
        assert steps >= 6
        assert steps % 3 == 0


def test_router() -> None:
    """Clients are sent to the replicas in turn."""
    manager = load("router")
    config = ClusterConfig(server=HttpConfig(port=0))
    status = ClusterStatus([ReplicaStatus(index, "ready") for index in range(2)])
    router: Router = manager.build(
        "router", manager.make("router", "redirect"), cluster=config, status=status, policy=None
    )

    async def body() -> None:
        url = await router.start()
        try:
            async with httpx.AsyncClient(base_url=url) as client:
                for index in range(2):
                    await router.add(index, f"http://replica-{index}")
                places = [(await client.post("/v1/completions")).headers["location"] for _ in range(4)]
                assert sorted(places) == [f"http://replica-{index}/v1/completions" for index in (0, 0, 1, 1)]
                await router.remove(0)
                assert (await client.get("/v1/models")).headers["location"] == "http://replica-1/v1/models"
                assert (await client.get("/health")).json()["ready"] == 2
                assert [replica.requests for replica in status.replicas] == [2, 3]
        finally:
            await router.close()

    asyncio.run(body())


def test_moe() -> None:
    with LLM("tutor-moe", overrides=["device=cpu", "num_pages=64"]) as engine:
        expected = tokens(engine)
    with llm("moe", "moe=load", "moe.backend=torch", model="tutor-moe") as engine:
        assert tokens(engine) == expected
        stats, backend = engine.scheduler.stats(), engine.engine.ctx.part("moe")  # type: ignore[union-attr]
        config = engine.engine.model.config  # type: ignore[union-attr]
    routed = (stats["prefill_tokens"] + stats["decode_tokens"]) * config.raw["num_experts_per_tok"]
    # The last layer computes only the tokens whose hidden states are needed.
    assert routed * (config.num_hidden_layers - 1) < sum(backend.tokens.values()) <= routed * config.num_hidden_layers
    assert set(backend.tokens) <= set(range(config.num_experts))


def test_graph(expected: list[list[int]]) -> None:
    """Steps of 1 to 4 rows are replayed, and steps of 5 rows run eagerly."""
    with llm("graph", "graph=small") as engine:
        assert tokens(engine) == expected
        runner = engine.engine.graph  # type: ignore[union-attr]
        assert [key.rows for key in runner.buckets(64)] == [1, 2, 4]
        assert runner.replayed > 0
        eager = runner.eager
        tokens(engine, [f"Count from {n} to 90." for n in range(5)])
        assert runner.eager > eager


def test_communicator(expected: list[list[int]]) -> None:
    """Two ranks: every layer has two all-reduces per step, whose bytes are those of the hidden states."""
    with llm("communicator", "communicator=traffic", "tp=2", "graph=none") as engine:
        assert tokens(engine) == expected
        rank_zero = engine.engine  # type: ignore[union-attr]
        comm, config, stats = rank_zero.comm, rank_zero.model.config, engine.scheduler.stats()
    assert (comm.rank, comm.size) == (0, 2)
    assert comm.all_reduces >= stats["steps"] * 2 * config.num_hidden_layers
    assert comm.bytes >= stats["decode_tokens"] * 2 * config.num_hidden_layers * config.hidden_size


def test_minisgl_models() -> None:
    """The log-probability of the first token changes only for a prompt that is longer than the window."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)

    def logprobs(engine: LLM) -> list[float]:
        outputs = engine.generate(["Hi", PROMPTS[1] * 8], params)
        return [output.logprobs[0].chosen for output in outputs if output.logprobs]

    with LLM("tutor", overrides=["device=cpu", "num_pages=64"]) as engine:
        full = logprobs(engine)
    with llm("minisgl_models", "architecture=WindowedQwen3") as engine:
        windowed = logprobs(engine)
        assert {layer.window for layer in engine.engine.model.attention_layers()} == {32}  # type: ignore[union-attr]
    assert windowed[0] == pytest.approx(full[0], abs=1e-5)
    assert windowed[1] != pytest.approx(full[1], abs=1e-3)


def test_minisgl_http() -> None:
    (echo,) = load("minisgl_http").hook.minisgl_http(config=Config(log_level="error"))
    app, router = FastAPI(), APIRouter()
    echo.add_routes(router, SimpleNamespace(model="m"))
    app.include_router(router)
    client = TestClient(echo.wrap(app))
    assert client.get("/echo/hello").json() == {"word": "hello", "model": "m"}
    assert client.get("/echo/hello", headers={"user-agent": ""}).status_code == 403


def test_minisgl_observer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = load("minisgl_observer")
    spec = pool(12)
    assert manager.plugins[-1].module.minisgl_observer(Config(log_level="error"), spec) is None
    simulate(manager, tmp_path)
    in_use = [12 - e.free - e.evictable - e.retiring for e in events(tmp_path, "Pool")]
    assert max(in_use) > 10
    printed = capsys.readouterr().out
    assert f"{max(in_use)} of 12 KV pages are in use" in printed
    assert printed.count("KV pages are in use") >= sum(n > 10 for n in in_use)


# ---- observers -------------------------------------------------------------------------------------------


def test_minisgl_request_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = load("minisgl_request_added")
    observer = observer_of(manager)
    observer.limit = 13
    simulate(manager, tmp_path)
    assert (observer.requests, observer.long) == (6, 2)
    assert "request 6 has a prompt of 15 tokens" in capsys.readouterr().out


def test_minisgl_prefix_matched(tmp_path: Path) -> None:
    manager = load("minisgl_prefix_matched")
    drive = simulate(manager, tmp_path)
    observer, matches = observer_of(manager), events(tmp_path, "Match")
    assert observer.admissions == sum(drive.report.counts.admissions.values()) == len(matches)
    assert observer.hits == sum(len(e.pages) > 0 for e in matches) > 0
    assert observer.pages * 4 == drive.scheduler.stats()["cached_tokens"]


def test_minisgl_request_retracted(tmp_path: Path) -> None:
    manager = load("minisgl_request_retracted")
    drive = simulate(manager, tmp_path)
    by_request = observer_of(manager).by_request
    assert sum(by_request.values()) == drive.report.retractions > 0
    assert by_request == Counter(e.uid for e in events(tmp_path, "Retract"))


def test_minisgl_request_finished(tmp_path: Path) -> None:
    manager = load("minisgl_request_finished")
    simulate(manager, tmp_path)
    assert observer_of(manager).reasons == {"length": 5, "abort": 1}


def test_minisgl_pages_allocated(tmp_path: Path) -> None:
    manager = load("minisgl_pages_allocated")
    simulate(manager, tmp_path)
    allocated = Counter(uid for e in events(tmp_path, "Allocate") for uid in e.owners)
    assert observer_of(manager).pages == allocated
    assert set(allocated) == {1, 2, 3, 4, 5, 6}


def test_minisgl_pages_cached(tmp_path: Path) -> None:
    """A policy that computes two equal prompts of 4 whole pages at the same time makes 4 duplicates."""
    policy = load("minisgl_configs")
    capped = policy.build("scheduler", policy.make("scheduler", "capped"))
    manager = load("minisgl_pages_cached")
    drive = simulate(manager, tmp_path, [job(1, 17, 3, first=1), job(2, 17, 3, first=1)], policy=capped, spec=SPEC)
    observer = observer_of(manager)
    assert observer.duplicates == 4
    assert observer.inserted == drive.cache.total_pages == sum(len(e.pages) for e in events(tmp_path, "Cache"))


def test_minisgl_pages_evicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = load("minisgl_pages_evicted")
    drive = simulate(manager, tmp_path)
    evicted = drive.scheduler.stats()["evicted_pages"]
    assert observer_of(manager).pages == evicted > 0
    assert f"{evicted} so far" in capsys.readouterr().out


def test_minisgl_pages_freed(tmp_path: Path) -> None:
    manager = load("minisgl_pages_freed")
    simulate(manager, tmp_path)
    observer = observer_of(manager)
    assert observer.total == sum(len(e.pages) for e in events(tmp_path, "Free"))
    assert observer.largest >= max(e.retiring for e in events(tmp_path, "Pool")) > 0


def test_minisgl_pages_counted(tmp_path: Path) -> None:
    manager = load("minisgl_pages_counted")
    simulate(manager, tmp_path)
    assert observer_of(manager).pages == min(e.free + e.evictable for e in events(tmp_path, "Pool")) < 12


def test_minisgl_batch_planned(tmp_path: Path) -> None:
    manager = load("minisgl_batch_planned")
    drive = simulate(manager, tmp_path)
    observer, batches = observer_of(manager), events(tmp_path, "Batch")
    assert observer.tokens == drive.report.counts.max_tokens
    assert sum(batches[observer.step].num_scheduled_tokens) == observer.tokens


def test_minisgl_batch_scheduled(tmp_path: Path) -> None:
    manager = load("minisgl_batch_scheduled")
    stats = simulate(manager, tmp_path).scheduler.stats()
    observer = observer_of(manager)
    assert observer.steps == stats["steps"]
    assert (observer.decode_rows, observer.prompt_tokens) == (stats["decode_tokens"], stats["prefill_tokens"])


def test_minisgl_step_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = load("minisgl_step_finished")
    clients = [job(1, 9, 110)]
    drive = simulate(manager, tmp_path, clients, spec=SPEC)
    observer = observer_of(manager)
    assert observer.tokens == len(drive.report.tokens[1]) == 110
    assert "1 output tokens per second" in capsys.readouterr().out  # the clock counts steps


def test_minisgl_metrics(tmp_path: Path) -> None:
    manager = load("minisgl_metrics")
    simulate(manager, tmp_path)
    families = text_string_to_metric_families("".join(manager.hook.minisgl_metrics()))
    found = {
        s.labels["reason"]: s.value for f in families for s in f.samples if s.name == "example_prompt_tokens_total"
    }
    assert found == {"length": 10 + 11 + 13 + 14 + 15, "abort": 12}


def test_minisgl_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drive = simulate(load("minisgl_closed"), tmp_path)
    output_tokens = sum(end.output_tokens for end in drive.report.finished.values())
    assert json.loads((tmp_path / "summary.json").read_text()) == {"requests": 6, "output_tokens": output_tokens}
