"""Starting an `LLM` or a server imports the plugins that the options select, and nothing that is around the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import pytest

from minisgl.plugin_manager.discovery import exists, submodules
from minisgl.testing.serving import Server

AROUND = ("bench", "trace", "testing", "cluster", "chapters")

LOADED = f"""
import sys
modules = [name for name in sys.modules if name.startswith("minisgl.")]
plugins = [name for name in modules if name.startswith("minisgl.plugins.")]
plugins = [name for name in plugins if any(key.startswith("minisgl_") for key in vars(sys.modules[name]))]
plugins = [name.removeprefix("minisgl.plugins.") for name in plugins]
around = sorted({{name.split(".")[1] for name in modules}} & set({AROUND}))
"""

SELECTED = {
    "attention.torch",
    "cache.prefix",
    "cache.radix",
    "communicator.auto",
    "communicator.torch",
    "fp8_gemm.auto",
    "grammar.auto",
    "graph.none",
    "kernels.auto",
    "kernels.cpp",
    "live.auto",
    "moe.torch",
    "reasoning_parser.auto",
    "scheduler.guard",
    "scheduler.prefill_first",
    "speculation.none",
    "speculation.verification",
    "tokenizer.auto",
    "tool_parser.auto",
}
PARTS = [word for word in ("graph=none", "moe=torch") if exists(f"minisgl.plugins.{word.replace('=', '.')}")]
OPTIONS = ("attention=torch", *PARTS, "device=cpu", "num_pages=64")
"""The options that select `SELECTED`, with the defaults of the other groups and the starvation guard."""


def selected(names: set[str]) -> set[str]:
    """Return the names without those that are all loaded: model families, processors of logits, extensions."""
    return {name for name in names if not name.startswith(("models.", "sampling.", "http."))}


def test_an_llm_imports_the_selected_plugins() -> None:
    code = f"""
        import json
        from minisgl.llm import LLM
        with LLM(overrides={list(OPTIONS)!r}) as llm:
            llm.generate("What is a radix cache?")
            {textwrap.indent(LOADED, " " * 12).strip()}
        print(json.dumps([plugins, around]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CXX": "none"}  # nothing is compiled
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    plugins, around = json.loads(done.stdout)
    assert selected(set(plugins)) == {name for name in SELECTED if exists(f"minisgl.plugins.{name}")}
    assert around == []


def test_the_processes_of_a_server_import_the_selected_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process writes what it has imported when it ends."""
    dump = f"""
        import atexit, os
        def write():
            {textwrap.indent(LOADED, " " * 12).strip()}
            with open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w") as file:
                print(plugins, around, sep=";", file=file)
        if any("minisgl" in word or "spawn" in word for word in sys.orig_argv):
            atexit.register(write)
    """
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\n" + textwrap.dedent(dump))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    off = ["live=off"] if exists("minisgl.plugins.live") else []
    with Server(*OPTIONS, *off) as server:  # the live view is made of the events of a trace
        messages = [{"role": "user", "content": "What is a radix cache?"}]
        body = {"model": "tutor", "messages": messages, "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
        server.process.terminate()
        server.wait(30)
    found = [tuple(map(eval, file.read_text().split(";"))) for file in tmp_path.iterdir() if file.is_file()]
    assert len(found) >= 2
    union = {name for plugins, _ in found for name in plugins}
    families = {f"tool_parser.{name}" for name in submodules("minisgl.plugins.tool_parser")}
    of_server = {"observer.heap", "observer.metrics", "scheduler.pauses", "live.off"}
    assert "scheduler.pauses" in union
    assert selected(union) <= SELECTED - {"live.auto"} | of_server | families  # each looks at the chat template
    assert {name for _, around in found for name in around} == set()
