"""The files around the code: workflows, hooks, forms and images. They load, and they name what exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]


def load(path: Path) -> Any:
    """Return the content of a YAML file, all scalars as strings: YAML 1.1 reads a workflow's `on` as true."""
    return yaml.load(path.read_text("utf-8"), yaml.BaseLoader)


def steps(workflow: Path) -> list[dict[str, Any]]:
    """Return the steps of all jobs."""
    return [step for job in load(workflow)["jobs"].values() for step in job["steps"]]


def pins() -> dict[str, str]:
    """Return the packages of constraints.txt with their versions."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines())
    return dict(line.split("==") for line in lines if line)


def instructions() -> list[list[str]]:
    """Return the Dockerfile's instructions as words, without comments, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines() if not line.startswith("#")]
    return [shlex.split(line) for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs(workflow: Path) -> None:
    """Every job has a machine and a time limit, and a token that reads only, unless the job says otherwise."""
    loaded = load(workflow)
    assert loaded["on"]
    assert loaded["permissions"] == {"contents": "read"}
    assert loaded["concurrency"]["group"]
    for name, job in loaded["jobs"].items():
        assert job["runs-on"], name
        assert 0 < int(job["timeout-minutes"]) <= 90, name


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_action_versions(workflow: Path) -> None:
    """Every action is pinned by its major version: `@v6`, or the branch `@release/v1`."""
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@(release/)?v\d+", step["uses"]), step["uses"]


def test_make_targets() -> None:
    """Every `make X` of a workflow and of the development container is in the Makefile."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = {f"{path.name}: {step.get('run', '')}" for path in WORKFLOWS for step in steps(path)}
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    commands.add(f"devcontainer.json: {container['postCreateCommand']}")
    named = 0
    for command in commands:
        for words in re.findall(r"\bmake((?: [a-z][a-z-]*)+)", command):
            for target in words.split():
                assert target in targets, command
                named += 1
    assert named >= 4


def test_forms() -> None:
    """Every issue form has what GitHub asks for, and no two fields of a form have the same id."""
    assert FORMS
    for path in FORMS:
        form = load(path)
        assert form["name"], path.name
        assert form["description"], path.name
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert all(field["attributes"]["label"] for field in fields), path.name
        ids = [field["id"] for field in fields]
        assert len(ids) == len(set(ids)), path.name


def test_dependabot() -> None:
    updates = load(GITHUB / "dependabot.yml")["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "pip"}


def test_ruff_version() -> None:
    """The hooks of a commit and `make lint` run the same ruff."""
    repos = {repo["repo"].rpartition("/")[2]: repo for repo in load(ROOT / ".pre-commit-config.yaml")["repos"]}
    assert repos["ruff-pre-commit"]["rev"] == f"v{pins()['ruff']}"


def test_uv_pins() -> None:
    """uv takes its pins from pyproject.toml, pip from constraints.txt: they are equal."""
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["uv"]
    assert dict(pin.split("==") for pin in uv["constraint-dependencies"]) == pins()


def test_dockerfile() -> None:
    """Both targets exist, and every file that an image copies exists and reaches the build."""
    sent = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    targets, ports = set(), 0
    for name, *words in instructions():
        if name == "FROM" and "AS" in words:
            targets.add(words[-1])
        ports += (name, words) == ("EXPOSE", ["1919"])
        if name == "COPY" and not words[0].startswith("--from="):
            for source in words[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in sent, f".dockerignore leaves {source} out"
    assert {"cpu", "cuda"} <= targets
    assert ports == 2


def test_security_address() -> None:
    """Reports go through the repository's host: neither page has a mail address."""
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md"):
        assert "@" not in (ROOT / name).read_text("utf-8"), name


def test_pages_publishes_a_version() -> None:
    """The workflow builds with warnings as errors, with edit links and a menu of versions, and pushes to one branch."""
    workflow = load(GITHUB / "workflows" / "pages.yml")
    job = workflow["jobs"]["publish"]
    assert {"SITE_REPOSITORY", "SITE_URL", "SITE_OFFLINE"} <= job["env"].keys()
    assert job["permissions"] == {"contents": "write"}
    commands = "\n".join(step.get("run", "") for step in job["steps"])
    assert "make docs" in commands and "mike deploy" in commands and "set-default" in commands


def test_citation() -> None:
    """CITATION.cff names the current version. cffconvert 2.0.0 --validate accepted the file with schema 1.2.0."""
    citation = load(ROOT / "CITATION.cff")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert citation["cff-version"] == "1.2.0" and citation["version"] == version
    assert citation["message"] and citation["title"].startswith("minisgl")
    assert all("name" in author or "family-names" in author for author in citation["authors"])


def test_readme_begins_with_a_clone_that_can_be_pasted(tmp_path: Path) -> None:
    """The first line of the README, pasted as it is, asks for the address and clones what is there."""
    first = re.search(r"```bash[^\n]*\n(.*?)\n", (ROOT / "README.md").read_text("utf-8"))
    assert first is not None
    subprocess.run(["git", "init", "-q", str(tmp_path / "address")], check=True, timeout=60)
    pasted = ["bash", "-c", f"{first[1]} && pwd"]
    done = subprocess.run(
        pasted, cwd=tmp_path, input=f"{tmp_path}/address\n", capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith(f"{tmp_path}/minisgl\n")
