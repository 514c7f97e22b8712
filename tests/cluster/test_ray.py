"""minisgl on Ray Serve (``minisgl[ray]``). `make check-cluster` installs Ray and runs these; `.ci/run` does not."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
import yaml

from minisgl.cluster.process import free_port
from minisgl.cluster.relay import PromptView
from minisgl.cluster.routing import Replica, live_replicas
from minisgl.config import ConfigError

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: make check-cluster", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # pydantic's about Ray
    from minisgl.cluster import ray_serve
    from minisgl.cluster.ray_serve import Call, Options, Views, build, engine_words

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "ray"
MARK = f"MINISGL_RAY_TEST={os.getpid()}"
SECONDS = 240.0
"""The longest time of a step: Ray takes long to start processes on a busy machine."""


# ---- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": "model=tutor server.port=80"}, "server.port: not available with Ray Serve"),
        ({"options": "model=tutor replicas=2"}, "replicas: not available with Ray Serve"),
        ({"options": "model=tutor trace=run.jsonl"}, "trace: not available with Ray Serve"),
        ({"options": "model=tutor tp=2", "num_gpus": 1}, "num_gpus=1 tp=2: a replica needs as many GPUs as ranks"),
        ({"options": "model=tutor device=cuda"}, "device=cuda num_gpus=0: the device follows from num_gpus"),
        ({"options": "model=tutor device=cpu", "num_gpus": 1}, "device=cpu num_gpus=1: the device follows"),
        ({"options": "model=tutor multi_node.interface=lo"}, "all GPUs of a replica are on one node"),
        ({"options": "model=tutor no_such=1"}, "no_such"),
        ({"options": "model=tutor routing=other"}, "routing"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_deployed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(arguments)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="max_replica\n"):
        build({"max_replica": 2})


def test_the_examples_are_valid() -> None:
    from ray.serve.schema import ServeDeploySchema

    kube = yaml.safe_load((EXAMPLES / "rayservice.yaml").read_text())
    for text in ((EXAMPLES / "serve.yaml").read_text(), kube["spec"]["serveConfigV2"]):
        schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
        [application] = schema.applications
        options = Options.model_validate(application.args)
        gpus = options.num_gpus
        assert engine_words(options.words, gpus)[-2:] == ["server.host=127.0.0.1", "server.port=0"]
    workers = kube["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == gpus


def test_the_words_of_an_engine() -> None:
    words = ["model=tutor", "routing=least_loaded", "routing.x=1", "router=exact", "health_timeout=9", "tp=2"]
    hosts, ends = "server.allowed_hosts=[*]", ["server.host=127.0.0.1", "server.port=0"]
    assert engine_words(words, 2) == ["model=tutor", "tp=2", hosts, "device=cuda", *ends]
    assert engine_words(words, 0) == ["model=tutor", "tp=2", hosts, "device=cpu", *ends]
    assert engine_words(["device=auto"], 0) == [hosts, "device=cpu", *ends]


# ---- the router's views --------------------------------------------------------------------------------------


class First:
    """A policy that chooses the first living replica, and records how many are alive."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def choose(self, block_hashes: Sequence[int], prompt_tokens: int, replicas: Sequence[Replica]) -> int:
        self.alive.append(len(live_replicas(replicas)))
        if prompt_tokens < 0:
            raise RuntimeError("a policy with a fault")
        return live_replicas(replicas)[0]


def test_views() -> None:
    """A policy sees each replica at one index. A new replica takes the index of a dead one."""
    policy = First()
    views = Views(policy)
    prompt = PromptView((1, 2), 40, 7)
    none: frozenset[str] = frozenset()
    assert views.update(["a", "b", "c"]) == []
    assert views.choose(prompt, ["a", "b", "c"], none) == "a"
    assert views.choose(prompt, ["a", "b", "c"], frozenset("a")) == "b"
    assert views.choose(prompt, ["b", "c"], frozenset("b")) == "c"
    assert views.choose(prompt, ["b"], frozenset("b")) == "b"  # there is no other one
    assert policy.alive == [3, 2, 1, 1] and all(view.alive for view in views.views)
    [gone] = views.update(["b", "c"])
    assert (gone.index, gone.view.alive) == (0, False)
    views.update(["b", "c", "d"])
    assert [views.known[name].index for name in "bcd"] == [1, 2, 0] and len(views.views) == 3
    assert views.choose(prompt, ["b", "c", "d"], none) == "d"
    views.known["d"].view.start(1, (), 5, 5)
    views.known["b"].view.start(1, (), 5, 5)
    assert views.choose(None, ["b", "c", "d"], none) == "c"
    assert views.choose(PromptView((), -1, 0), ["b", "c", "d"], none) == "c"  # the policy failed: by load


def test_a_call_counts_at_one_replica_until_its_end() -> None:
    events: list[tuple[str, str]] = []
    call = Call(b"POST", b"/v1/completions", [(b"host", b"x")], b"body")
    call.count_at("a", lambda event: events.append(("a", event)))
    call.count_at("b", lambda event: events.append(("b", event)))
    call.tell("first_token")
    call.tell("end")
    assert events == [("a", "end"), ("b", "first_token"), ("b", "end")]
    call.count_at("c", lambda event: events.append(("c", event)))  # the router was late
    assert events[3:] == [("b", "end"), ("c", "end")]
    sent = pickle.loads(pickle.dumps(call))
    assert (sent.method, sent.target, sent.headers, sent.body) == (call.method, call.target, call.headers, call.body)
    assert (sent.replica, sent.on, sent.ended) == ("", None, False)


# ---- an engine's health --------------------------------------------------------------------------------------


def test_a_server_that_has_ended_or_is_silent_for_long_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        exit_status: int | None = None

        async def wait(self) -> str:
            return "was killed by SIGKILL"

    async def body() -> None:
        answers = iter([True, False, True, False, False, False])

        async def is_healthy(upstream: Any) -> bool:
            return next(answers)

        monkeypatch.setattr(ray_serve, "is_healthy", is_healthy)
        process: Any = Process()
        health = ray_serve.Health(process, upstream=Any, timeout=2.5 * ray_serve.HEALTH_SECONDS)  # type: ignore[arg-type]
        for _ in range(5):
            await health.check()
        with pytest.raises(RuntimeError, match="health_timeout"):
            await health.check()
        process.exit_status = -9
        with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
            await health.check()

    asyncio.run(body())


# ---- the application -----------------------------------------------------------------------------------------


def marked(pattern: str = "") -> list[psutil.Process]:
    """Return the processes of this test run whose command line contains ``pattern``."""
    name, _, value = MARK.partition("=")
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(name) == value
                and process.status() != psutil.STATUS_ZOMBIE
                and pattern in " ".join(process.cmdline())
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def until(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.2)
    return found


class App:
    """A Ray cluster on this machine, and ``serve run`` with the example's configuration for the model ``tutor``."""

    def __init__(self, folder: Path):
        name, _, value = MARK.partition("=")
        self._folder = folder
        self.port = free_port()
        self._address = f"127.0.0.1:{free_port()}"
        self._log = (folder / "serve.log").open("w+")
        self._env = {
            **os.environ,
            name: value,
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            # A token of these tests. `ray start` would demand one in the home directory, which `serve` would not send.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_worker_niceness": "0",
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
            "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        }
        self._serve: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["--num-cpus=2", f"--object-store-memory={80 << 20}", "--include-dashboard=false"]
        ports = ["--ray-client-server-port", str(free_port()), "--min-worker-port=0", "--max-worker-port=0"]
        subprocess.run(
            [*self._command("ray"), "start", "--head", "--port", self._address.rpartition(":")[2], *options, *ports],
            env=self._env,
            check=True,
            stdout=self._log,
            stderr=self._log,
        )
        config = yaml.safe_load((EXAMPLES / "serve.yaml").read_text())
        config["proxy_location"] = "HeadOnly"
        config["http_options"] = {"host": "127.0.0.1", "port": self.port}
        config["applications"][0]["args"] = {
            "options": "model=tutor num_pages=1024 log_level=warning server.drain_timeout=60",
            "num_cpus": 1,
            "max_replicas": 2,
            "target_ongoing_requests": 2,
            "upscale_delay_s": 1,
            "downscale_delay_s": 6,
            "look_back_period_s": 3,
        }
        file = self._folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        self._serve = subprocess.Popen(
            [*self._command("serve"), "run", "--address", self._address, str(file)],
            env=self._env,
            stdout=self._log,
            stderr=self._log,
        )
        until(self.answers)

    def _command(self, name: str) -> list[str]:
        return [str(Path(sys.executable).with_name(name))]

    def answers(self) -> bool:
        assert self._serve is not None and self._serve.poll() is None, self.log()
        try:
            return httpx.get(f"{self.url}/v1/models", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-20_000:]

    # ---- replicas

    def actors(self) -> list[psutil.Process]:
        return marked("ServeReplica:minisgl:Engine")

    def servers(self) -> dict[int, str]:
        """Return the ready servers: process id of the main process → URL."""
        found = {}
        for process in marked("minisgl.cluster.attached"):
            try:
                if process.parent() is None or "ServeReplica" not in " ".join(process.parent().cmdline()):
                    continue
                listening = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                for port in listening:
                    if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=10).status_code == 200:
                        found[process.pid] = f"http://127.0.0.1:{port}"
            except (psutil.Error, httpx.HTTPError, OSError):
                continue
        return found

    def open_requests(self, url: str) -> int:
        return httpx.get(f"{url}/get_load", timeout=30).json()[0]["num_reqs"]

    def served(self, url: str) -> float:
        """Return how many requests a server has finished."""
        text = httpx.get(f"{url}/metrics", timeout=30).text
        return sum(float(number) for number in re.findall(r"^vllm:request_success_total{.*} (.*)", text, re.M))

    # ---- the end

    def stop(self) -> None:
        """End the application as Ctrl-C does. Afterwards no server is left, though Ray still runs."""
        assert self._serve is not None
        self._serve.send_signal(signal.SIGINT)
        self._serve.wait(SECONDS)
        until(lambda: not marked("minisgl.cluster.attached") and not self.actors())

    def kill(self) -> None:
        for _ in range(50):
            left = marked()
            if not left:
                break
            for process in left:
                try:
                    process.kill()
                except psutil.Error:
                    continue
            time.sleep(0.2)
        self._log.close()
        assert marked() == []


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # a short path: Ray's sockets are below it
        app = App(Path(folder))
        try:
            app.start()
            yield app
        finally:
            print(app.log(), file=sys.stderr)
            app.kill()


MESSAGES: Any = [{"role": "user", "content": "What is a KV cache?"}]
LONG: Any = {"max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
"""Options of a stream that runs for many seconds."""


def others(index: int) -> Any:
    """Return a prompt that has no prefix in common with those of other numbers: no replica has an advantage."""
    return [{"role": "user", "content": f"{index} is the number of this long story. Continue it."}]


async def ask(client: openai.AsyncOpenAI, **options: Any) -> tuple[str, str | None]:
    """Return the text of a streamed answer and its finish reason. Raise `openai.APIError` if it breaks off."""
    text, reason = "", None
    stream = await client.chat.completions.create(
        **{"model": "tutor", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, "stream": True, **options}
    )
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


async def wait_for(condition: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(until, condition)


async def wait_for_two(app: App, client: openai.AsyncOpenAI) -> None:
    """Wait until two replicas have answered requests: Ray learns of a new one some time after its server is ready."""
    await wait_for(lambda: len(app.servers()) == 2)
    for index in range(1000):
        if all(map(app.served, app.servers().values())):
            return
        await ask(client, messages=others(index))
    raise TimeoutError


@pytest.mark.timeout(900)
def test_streams_pass_unchanged(app: App) -> None:
    """Errors and events are those of the server. The engine computes with its share of the cores."""
    [(pid, url)] = until(app.servers).items()
    body = {"model": "tutor", "messages": MESSAGES, "temperature": 0, "max_tokens": 8, "stream": True}
    answers = []
    for base in (url, app.url):
        answer = httpx.post(f"{base}/v1/chat/completions", json=body, headers={"x-request-id": "mine"}, timeout=60)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        for name in ("x-request-id", "date", "server"):
            assert len(answer.headers.get_list(name)) == 1
        assert answer.headers["x-request-id"] == "mine"
        assert answer.text.endswith("data: [DONE]\n\n")
        events = [msgspec.json.decode(line[6:]) for line in answer.text.split("\n\n")[:-2]]
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        answers.append((text, {event["id"] for event in events}, events[-1]["choices"][0]["finish_reason"]))
    assert answers[0] == answers[1] and answers[0][1] == {"chatcmpl-mine"}
    assert (
        httpx.get(f"{app.url}/nothing", timeout=60).json()["error"]["message"] == "Unknown request URL: GET /nothing."
    )
    wrong = httpx.post(f"{app.url}/v1/completions", content=b"{", timeout=60)
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
    environment = psutil.Process(pid).environ()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "device=cpu" in psutil.Process(pid).cmdline()


@pytest.mark.timeout(900)
def test_a_client_that_disconnects_aborts_its_request(app: App) -> None:
    [url] = until(app.servers).values()
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", timeout=60) as client:
        stream = client.chat.completions.create(model="tutor", messages=MESSAGES, **LONG)
        next(iter(stream))
        assert app.open_requests(url) == 1
        stream.close()
    until(lambda: app.open_requests(url) == 0, 10.0)
    metrics = httpx.get(f"{url}/metrics", timeout=60).text
    assert re.search(r'request_success_total{.*finished_reason="abort".*} 1.0', metrics)


@pytest.mark.timeout(1800)
def test_a_load_that_grows_a_replica_that_dies_and_a_load_that_ends(app: App) -> None:
    """100 streams: from one replica to two by the queue, one killed under load, and back to one, which drains."""

    async def body() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{app.url}/v1", api_key="none", timeout=SECONDS, max_retries=0
        ) as client:
            expected = await ask(client)
            done: list[tuple[str, str | None]] = []
            enough = asyncio.Event()

            async def keep_asking() -> None:
                while not enough.is_set() or len(done) < 70:
                    done.append(await ask(client))

            load = [asyncio.create_task(keep_asking()) for _ in range(8)]
            await wait_for(lambda: len(app.servers()) == 2)
            await wait_for_two(app, client)
            enough.set()
            await asyncio.gather(*load)
            assert set(done) == {expected}  # and none failed

            # Both replicas have long streams. One is killed: only its streams end with an error.
            streams = [asyncio.create_task(ask(client, messages=others(n), **LONG)) for n in range(8)]
            await wait_for(lambda: sum(map(app.open_requests, app.servers().values())) == 8)
            actors = app.actors()
            victim = actors[0]
            children = victim.children(recursive=True)
            [server] = [pid for pid in app.servers() if psutil.Process(pid).parent() == victim]
            lost = app.open_requests(app.servers()[server])
            assert 0 < lost < 8 and len(children) >= 3
            victim.kill()
            await wait_for(lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children))
            more = [asyncio.create_task(ask(client)) for _ in range(22)]
            ends = await asyncio.gather(*streams, return_exceptions=True)
            errors = [end for end in ends if isinstance(end, BaseException)]
            assert len(errors) == lost and all("died before" in str(error) for error in errors)
            assert [end[1] for end in ends if not isinstance(end, BaseException)] == ["length"] * (8 - lost)
            assert set(await asyncio.gather(*more)) == {expected}
            assert len(done) + len(streams) + len(more) >= 100

    asyncio.run(body())


@pytest.mark.timeout(900)
def test_a_prefix_stays_on_one_replica(app: App) -> None:
    """Each of two long prefixes is computed once, on one of the two replicas."""

    async def body() -> None:
        async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", timeout=SECONDS) as client:
            load = [
                asyncio.create_task(ask(client, messages=others(n), **LONG)) for n in range(6)
            ]  # which keeps the second replica
            await wait_for_two(app, client)
            await asyncio.sleep(6.0)  # the router follows the KV events of a new replica after some seconds
            uncached = []
            for index in range(12):
                text = " ".join(f"{'left' if index % 2 else 'right'} {n}" for n in range(120))
                answer = await client.completions.create(model="tutor", prompt=f"{text} {index}", max_tokens=1)
                assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
                cached = answer.usage.prompt_tokens_details.cached_tokens or 0
                uncached.append(answer.usage.prompt_tokens - cached > 100)
            assert uncached == [True, True, *[False] * 10]
            await asyncio.gather(*load)

    asyncio.run(body())


@pytest.mark.timeout(900)
def test_a_replica_that_is_removed_finishes_its_streams(app: App) -> None:
    async def body() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{app.url}/v1", api_key="none", timeout=SECONDS, max_retries=0
        ) as client:
            load = [asyncio.create_task(ask(client, messages=others(n), **LONG)) for n in range(6)]
            await wait_for_two(app, client)
            await asyncio.gather(*load)
            last = [
                asyncio.create_task(ask(client, messages=others(n), **LONG)) for n in range(2)
            ]  # as many as one replica should have
            await wait_for(lambda: len(app.actors()) == 1)
            assert [reason for _, reason in await asyncio.gather(*last)] == ["length"] * 2
            await wait_for(lambda: len(marked("minisgl.cluster.attached")) == 1)
            assert (await ask(client))[1]

    asyncio.run(body())


@pytest.mark.timeout(900)
def test_a_dead_server_is_replaced(app: App) -> None:
    """Ray's actor lives, and its health check fails. Until there is another one, requests get 503 or wait."""
    [(pid, _)] = until(lambda: (found := app.servers()) and len(found) == 1 and found).items()
    [actor] = app.actors()
    psutil.Process(pid).kill()
    until(lambda: app.servers() and pid not in app.servers())
    until(lambda: not actor.is_running() or actor.status() == psutil.STATUS_ZOMBIE)
    until(app.answers)


@pytest.mark.timeout(900)
def test_the_end_leaves_nothing(app: App) -> None:
    """`serve run` ends at Ctrl-C, with all servers."""
    app.stop()
    assert marked("minisgl.cluster.attached") == []
