"""The commands and programs on the pages of the documentation work.

Blocks with ``exec=`` run in `test_rendered`, or while the site is built. These tests run all other blocks, page by
page, each page in a folder of its own. A block with ``skip="reason"`` is not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.chapters.lab import catalog
from minisgl.chapters.lab.museum.pieces import pieces
from minisgl.chapters.site.__main__ import course
from minisgl.chapters.site.blocks import Block, blocks
from minisgl.cluster.options import ClusterConfig
from minisgl.config import Config
from minisgl.options.compose import compose, split_plugins
from minisgl.plugin_manager.manager import PluginManager

ROOT = Path(__file__).resolve().parents[2]
README = "README.md"
DOCS = ("plugins", "speculation", "testing", "trace", "reference/http-api")
PAGES = [README, *(f"docs/{name}.md" for name in DOCS), *(path for path, _ in course(ROOT))]
EXAMPLE_PLUGIN = "my_cache.py"
"""A plugin file that the README uses as an example of a reader's own file."""


def to_run(page: str) -> list[Block]:
    """Return the blocks of a page that a reader runs and that the site's build does not run."""
    found = blocks((ROOT / page).read_text(encoding="utf-8"))
    return [b for b in found if b.language in ("bash", "python") and not {"exec", "quote", "check"} & b.options.keys()]


def commands(block: Block) -> list[str]:
    """Return the commands of a bash block, without comments and environment variables; ``a && b`` is two commands."""
    lines = block.code.replace("\\\n", " ").splitlines()
    bare = [re.sub(r"\s+#.*", "", line).strip() for line in lines]
    parts = [part.strip() for line in bare for part in line.split(" && ")]
    return [re.sub(r"^([A-Z_]+=\S+ )+", "", part) for part in parts if part and not part.startswith("#")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which a page's commands run, with the chapters and this interpreter on the path."""
    (tmp_path / "chapters").symlink_to(ROOT / "chapters")
    counting = next(b.code for b in to_run("docs/plugins.md") if b.options.get("title") == "counting.py")
    (tmp_path / EXAMPLE_PLUGIN).write_text(counting.replace("counting", "mine"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def compose_words(words: list[str], kind: type[Config] = Config) -> None:
    """Compose the options, as the server does, or a cluster, before it starts anything."""
    named, rest = split_plugins([word for word in words if word not in ("--help", "--cfg", "job")])
    compose(PluginManager.load(named, light=True), rest, kind)


def check_lab(words: list[str]) -> None:
    """Check that the command and the lab exist. The tests of the labs run them."""
    if words[0] == "break":
        assert words[1] in {piece.name for piece in pieces()}, f"there is no piece {words[1]}"
        return
    assert words[0] in ("list", "start", "test", "watch", "hint", "status", "diff")
    assert not words[1:] or words[1] in {lab.lab for lab in catalog.labs()}, f"there is no lab {words[1]}"


def run(command: str, folder: Path) -> None:
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)])
def test_blocks_of_a_page_run(page: str, folder: Path) -> None:
    python = ""
    for block in to_run(page):
        if "skip" in block.options:
            assert len(block.options["skip"]) > 10, f"{page}:{block.line}: give a longer reason for skip"
        elif title := block.options.get("title"):
            (folder / title).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            python += block.code
        else:
            for command in commands(block):
                words = command.split()
                if words[:3] == ["python", "-m", "minisgl"]:
                    compose_words(words[3:])
                elif words[:3] == ["python", "-m", "minisgl.cluster"]:
                    compose_words(words[3:], ClusterConfig)
                elif words[:3] == ["python", "-m", "minisgl.lab"]:
                    check_lab(words[3:])
                elif words != ["source", ".venv/bin/activate"]:  # this interpreter's environment is active
                    run(command, folder)
    if python:
        (folder / "page.py").write_text(python, encoding="utf-8")
        run("python page.py", folder)


def test_readme_example_prints_an_answer() -> None:
    code = next(b.code for b in to_run(README) if b.language == "python" and "title" not in b.options)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    assert "radix" in result.stdout


def test_plugins_of_the_pages_work_in_the_engine(tmp_path: Path) -> None:
    from minisgl import LLM, SamplingParams

    for page in (README, "docs/plugins.md"):
        for block in to_run(page):
            if "title" in block.options:
                (tmp_path / block.options["title"]).write_text(block.code, encoding="utf-8")
    prompts = ["What is a radix cache?", "Count from 5 to 9.", "What is 12 + 30?"]
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM("tutor", overrides=["device=cpu"]) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    words = [f"plugins=[{tmp_path}/shortest.py,{tmp_path}/counting.py,{tmp_path}/meter.py]"]
    words += ["scheduler=shortest", "cache=counting", "cache.report_every=2", "page_size=4", "device=cpu"]
    with LLM("tutor", overrides=words) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        meter = next(p for p in llm.plugin_manager._manager.get_plugins() if type(p).__name__ == "Meter")
        assert meter.steps > 0


def test_make_targets_and_links_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [README, "CONTRIBUTING.md", *(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("**/*.md"))]:
        text = (ROOT / page).read_text("utf-8")
        for target in re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE):
            assert target in targets, f"{page}: make {target}"
        if page.startswith("docs/"):
            continue  # the site's build checks its links
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def test_commands_are_split() -> None:
    block = Block("bash", {}, "A=1 python -m x \\\n  y  # why\n# a comment\nb && c\n", 1, "", "")
    assert commands(block) == ["python -m x    y", "b", "c"]
