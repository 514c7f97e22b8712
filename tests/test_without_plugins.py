"""Whatever is faster or optional is a plugin: without its folder, the engine answers as before.

Each test copies the package, deletes plugins from the copy, and runs the copy in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl import LLM, SamplingParams
from minisgl.testing.serving import Server

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(
    {p.name for p in (ROOT / "plugins").iterdir() if p.is_dir() and not p.name.startswith("_")} - {"models"}
)
KEPT = ("attention/torch.py", "cache/naive.py", "scheduler/prefill_first.py", "models")
"""What the plain engine needs: one attention backend, one cache, one policy, and the families of models."""
NEEDED = {"attention": "torch.py", "cache": "naive.py", "scheduler": "prefill_first.py"}
"""The plugin of a kind that stays if all others of the kind are deleted."""

NO_CHECKOUT = f"""
{(ROOT / "tests" / "children" / "sitecustomize.py").read_text("utf-8")}
import sys
# An editable install would find the checkout's copy of what was deleted.
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in f"{{getattr(f, '__module__', '')}}{{f!r}}"]
"""
PROMPTS = ["What is a radix cache?", "How many legs has a spider?", "One two three one two three one two"]
GENERATE = f"""
import json, sys
import minisgl
assert minisgl.__file__.startswith(sys.argv[1]), minisgl
from minisgl import LLM, SamplingParams
with LLM("tutor", overrides=["device=cpu", "num_pages=64"]) as llm:
    made = llm.generate({PROMPTS!r}, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
print("made", json.dumps([output.token_ids for output in made]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy the package as a wheel installs it, with all plugins. Return the folder for ``PYTHONPATH``."""
    skip = shutil.ignore_patterns("build")  # compiled modules are valid in the copy, and of no use without their source
    shutil.copytree(ROOT / "minisgl", tmp_path / "minisgl", ignore=skip)
    for name in ("plugins", "conf"):
        shutil.copytree(ROOT / name, tmp_path / "minisgl" / name, ignore=skip)
    (tmp_path / "sitecustomize.py").write_text(NO_CHECKOUT, "utf-8")
    return tmp_path


def environment(tree: Path) -> dict[str, str]:
    """Return the variables with which a process sees the tree and not the checkout."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "CXX": "none", "OMP_NUM_THREADS": "1"}


def generate(tree: Path) -> Any:
    """Return the tokens of `PROMPTS`, computed by the tree's `LLM` in a process of its own."""
    command = [sys.executable, "-c", GENERATE, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment(tree), cwd=tree)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("made ")]
    return json.loads(line.removeprefix("made "))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the tokens of `PROMPTS` with all plugins."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM("tutor", overrides=["device=cpu", "num_pages=64"]) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, params)]


def chat(server: Server) -> str:
    """Return the text of a streamed chat."""
    messages = [{"role": "user", "content": "How many legs has a spider?"}]
    body = {"model": "tutor", "messages": messages, "max_tokens": 16, "temperature": 0, "stream": True}
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
    return text


@pytest.mark.parametrize("folder", FOLDERS)
def test_one_kind_of_plugin_is_missing(tree: Path, expected: Any, folder: str) -> None:
    """Of the kinds that the plain engine needs, one plugin stays."""
    kind = tree / "minisgl" / "plugins" / folder
    for path in kind.iterdir():
        if path.name not in ("__init__.py", NEEDED.get(folder)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if folder not in NEEDED:
        shutil.rmtree(kind)
    assert generate(tree) == expected


def test_plain_engine_serves(tree: Path, expected: Any) -> None:
    """Only `KEPT` is left. The answers over HTTP and of `LLM` are those of the whole project."""
    plugins = tree / "minisgl" / "plugins"
    for path in sorted(plugins.rglob("*.py"), reverse=True):
        place = path.relative_to(plugins).as_posix()
        if path.name != "__init__.py" and not place.startswith(KEPT):
            path.unlink()
    for path in plugins.iterdir():
        if path.is_dir() and not any(place.startswith(path.name) for place in KEPT):
            shutil.rmtree(path)
    assert generate(tree) == expected
    with Server("model=tutor", "num_pages=64") as whole:
        text = chat(whole)
    with Server("model=tutor", "num_pages=64", env=environment(tree)) as plain:
        assert chat(plain) == text != ""
