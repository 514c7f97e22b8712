"""The command line of the server, run in its own process: wrong arguments, and a user's plugin file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.testing.serving import Server, patient_timeout

PLUGIN = '''
"""Three plugins in one file: a policy, an attention backend that wraps another, and an observer. All write to a log."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from minisgl import hookimpl
from minisgl.scheduler import Plan

LOG = Path(__file__).with_suffix(".log")


def note(what):
    with LOG.open("a") as log:
        log.write(json.dumps([what, os.getpid(), __name__]) + "\\n")


note("loaded")


@dataclass
class MinePolicy:
    """Mine."""

    chunk: int = 5

    def build(self):
        note(f"policy chunk={self.chunk}")
        return Policy(self.chunk)


@dataclass
class MineAttention:
    """Mine."""

    of: str = "torch"

    def build(self, device, build_other):
        note(f"attention on {torch.device(device).type}")
        return build_other(self.of)


class Policy:
    def __init__(self, chunk):
        self.chunk = chunk

    def plan(self, waiting, running, budget):
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, min(r.num_remaining_tokens or 1, self.chunk)))]
        for w in waiting:
            if not (n := budget.grant(w, min(w.num_tokens - w.num_cached_tokens, self.chunk))):
                break
            rows.append((w.uid, n))
        return Plan(rows)


@hookimpl
def minisgl_configs():
    yield "scheduler", "mine", MinePolicy
    yield "attention", "mine", MineAttention


class Watch:
    @hookimpl
    def minisgl_request_finished(self, req):
        note(f"finished {req.finish_reason}")
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minisgl", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tp=two"], "tp=two: tp must be a whole number."),
        (["page_size=0"], "page_size=0: page_size must be at least 1."),
        (["modle=tutor"], "There is no option 'modle'. Did you mean model?"),
        (["cache=rdix"], "cache=rdix: there is no such cache. Did you mean radix?"),
        (["plugins=gone.py"], "plugins=gone.py: there is no such file"),
        (["plugins=empty.py"], "empty.py has no hook"),
        (["plugins=needy.py"], "it needs the package 'no_such_package'"),
        (["model=nowhere"], "model=nowhere"),
        (["model=empty_folder"], "config.json"),
        (["--port", "80"], "--port: there is no such flag."),
        # the error of a worker process
        (["server.port=0", "log_level=warning", "scheduler.order=random"], "order='random'"),
        (["server.port=0", "log_level=warning", "kv_events.endpoint=ipc:///no/folder/kv"], "No such file or directory"),
    ],
)
def test_wrong_arguments(tmp_path: Path, words: list[str], expected: str) -> None:
    """A wrong argument ends the program with status 2 and one line on standard error, and leaves no file behind."""
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "needy.py").write_text("import no_such_package\n")
    (tmp_path / "empty_folder").mkdir()
    result = run(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("minisgl: ")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == [
        "empty.py",
        "empty_folder",
        "needy.py",
    ]


def test_help_and_cfg_are_fast(tmp_path: Path, plugin: Path) -> None:
    begun = time.monotonic()
    shown = run("--help", f"plugins={plugin}", cwd=tmp_path).stdout
    assert "scheduler.chunk=5" in shown
    assert "tp: 3\n" in run("--cfg", "job", "tp=3", cwd=tmp_path).stdout
    assert time.monotonic() - begun < patient_timeout(20.0)  # 0.6 s on an idle machine


def ask(server: Server, prompt: str) -> dict[str, Any]:
    body = {"model": "tutor", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_plugin_file_with_tp_2(plugin: Path) -> None:
    """The launcher and both ranks load the plugin file. The tokenizers get no options and load no plugin."""
    prompt = "Paged attention reads keys and values through"
    words = [f"plugins={plugin}", "scheduler=mine", "scheduler.chunk=3", "attention=mine", "tp=2", "num_pages=64"]
    with Server(*words) as server:
        workers = server.workers()
        ours, server_pid = ask(server, prompt), server.process.pid
        ranks = {pid for name, pid in workers.items() if name.startswith("scheduler")}
        if os.path.isdir("/proc"):
            assert {pid for pid in workers.values() if maps_torch(pid)} == ranks, workers
            for pid in ranks:  # without it, torch's threads spin while they wait: see plugins/kernels/openmp.py
                assert b"OMP_WAIT_POLICY=PASSIVE" in Path(f"/proc/{pid}/environ").read_bytes()
    with LLM("tutor", overrides=["device=cpu", "num_pages=64"]) as llm:
        theirs = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24))[0].text
    assert ours["choices"][0]["text"] == theirs

    log = [json.loads(line) for line in plugin.with_suffix(".log").read_text().splitlines()]
    assert len(ranks) == 2
    assert {pid for what, pid, _ in log if what == "loaded"} == ranks | {server_pid}
    assert len({name for _, _, name in log}) == 1  # the module has the same name in every process
    assert {pid for what, pid, _ in log if what == "attention on cpu"} == ranks
    (rank0,) = {pid for what, pid, _ in log if what == "policy chunk=3"}
    assert rank0 in ranks
    ended = [(what, pid) for what, pid, _ in log if what.startswith("finished")]
    assert ended == [(f"finished {ours['choices'][0]['finish_reason']}", rank0)]


def test_demo() -> None:
    command = [sys.executable, "-m", "minisgl.demo", "device=cpu", "num_pages=256"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    assert "minisgl is ready: http://127.0.0.1:" in result.stdout
    assert "radix tree" in result.stdout
    assert "579" in result.stdout
    assert "4071" in result.stdout
    assert '[calls calculator] {"expression": "37 * 48"}' in result.stdout
    assert "     tool: 1776\nassistant: 37 * 48 = 1776." in result.stdout
    assert result.stdout.count("tok/s)") == 5
    assert "The server ended with status 0." in result.stdout
    assert "loading weights" in result.stderr
    assert "minisgl.access" not in result.stderr  # the log would be in the middle of the replies


def test_demo_with_wrong_option() -> None:
    command = [sys.executable, "-m", "minisgl.demo", "tp=0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "minisgl: tp=0: tp must be at least 1.",
        "The server did not start (exit status 2).",
    ]
