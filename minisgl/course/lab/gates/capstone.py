"""Lab `capstone`: a package is built, installed where nothing else of its author's is, found, tested and served."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from minisgl.course.lab.catalog import Lab
from minisgl.course.lab.folder import MEMORY
from minisgl.course.lab.grader.clean_environment import Clean, NotBuilt, clean
from minisgl.course.lab.grader.gate import Broken, Gate, Missing, Student
from minisgl.course.lab.grader.installed_package import KITS
from minisgl.course.lab.grader.server_gate import START_SECONDS, Served, facts
from minisgl.testing.serving import Server, patience

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "my-capstone"
version = "0.1.0"
description = "A minisgl plugin"
requires-python = ">=3.11"
dependencies = ["minisgl"]

# How minisgl finds it: every installed package may name modules here.
[project.entry-points.minisgl]
mine = "my_capstone"

[tool.setuptools.packages.find]
where = ["src"]
"""

PLUGIN = '''\
"""`scheduler=mine`: a plugin of your own. Any hook will do; this begins as a scheduling policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.scheduler import Budget, Plan, Running, SchedulerPolicy, Waiting


@dataclass
class Mine:
    """What `--help` says about it."""


class MyPolicy:
    """What it is for."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        # TODO capstone: your own, for this hook or another (docs/plugins.md lists them).
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "mine", Mine


@hookimpl
def minisgl_scheduler(config: Any) -> SchedulerPolicy | None:
    return MyPolicy() if isinstance(config, Mine) else None
'''

TESTS = '''\
"""The public kit for the hook, and whatever else your plugin promises."""

from __future__ import annotations

from my_capstone import MyPolicy

from minisgl.scheduler import SchedulerPolicy
from minisgl.testing.policy import PolicyConformance


class TestMyPolicy(PolicyConformance):
    def make(self) -> SchedulerPolicy:
        return MyPolicy()
'''

README = """\
# my-capstone

A plugin for minisgl, as a package: `pip install .`, and `python -m minisgl scheduler=mine` has it.

    python -m minisgl.lab test capstone     # builds it, installs it into a clean environment, tests it there
"""

SERVE: dict[str, tuple[list[str], str]] = {
    "scheduler": ([], "plan"),
    "cache": ([], "match"),
    "attention": ([], "forward"),
    "moe": (["model=tutor-moe", "server.served_model_name=tutor"], "forward"),
    "communicator": (["tp=2"], "all_reduce"),
}
"""Group → options that put it to work, and a method that is then called."""


def skeleton() -> dict[str, str]:
    """What `start` writes: a whole package whose plugin does nothing yet."""
    return {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        "src/my_capstone/__init__.py": PLUGIN,
        "tests/test_my_capstone.py": TESTS,
    }


def environment(path: Path) -> Clean:
    """The package in a clean environment, beside what the lab remembers. Raises `Broken`, `Missing`."""
    if not path.is_dir():
        raise Broken("build", "The package can be built.", f"{path.name} is a file; a package is a folder.")
    try:
        return clean(path, path.parent / MEMORY / "clean")
    except NotBuilt as error:
        raise Broken("build", "The package can be built.", error.why) from error


def ask(env: Clean, *words: str, seconds: float = 40.0) -> dict[str, Any]:
    """What `minisgl.course.lab.grader.installed_package` says in the environment. Raises `Broken`."""
    try:
        told = env.run("-m", "minisgl.course.lab.grader.installed_package", *words, seconds=seconds)
    except subprocess.TimeoutExpired as error:
        raise Broken("hangs", "It comes back.", f"Not done after {seconds:.0f} s: {' '.join(words)}.") from error
    if told.returncode:
        last = [line for line in told.stderr.splitlines() if line.strip()][-1:]
        raise Broken("installed", "It loads where it is installed.", "".join(last))
    answer: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return answer


def plugins(env: Clean) -> list[dict[str, Any]]:
    """What the package adds to minisgl. Raises `Broken` where that is nothing."""
    promise = "Once it is installed, minisgl finds its plugin by the entry point."
    known = env.tests.parent / "found.json"
    told = json.loads(known.read_text()) if known.is_file() else ask(env, "found", env.dist)
    known.write_text(json.dumps(told))
    if "error" in told:
        raise Broken("installed", promise, told["error"])
    if not told["plugins"]:
        has = f"It has entry points for {', '.join(told['groups'])}." if told["groups"] else "It has no entry point."
        raise Broken("entry-point", promise, f"{has} The group must be `minisgl`.")
    found: list[dict[str, Any]] = told["plugins"]
    inside = [plugin for plugin in found if not Path(plugin["path"]).is_relative_to(env.site.resolve())]
    if inside:
        raise Broken("installed", promise, f"{inside[0]['module']} was found in {inside[0]['path']}: not installed.")
    return found


def package(student: Student) -> str:
    env = environment(student.path)
    return f"{env.dist} is built and installed"


def found(student: Student) -> str:
    told = []
    for plugin in plugins(environment(student.path)):
        options = [f"{group}={name}" for group, name in plugin["options"]]
        told.append(", ".join(options) or f"{plugin['module']} ({len(plugin['hooks'])} hooks)")
    return "; ".join(told)


def tests(student: Student) -> str:
    """Its own tests, from a copy beside which its code is not, with pytest and none of its plugins."""
    env = environment(student.path)
    notes = env.tests.parent / "probe.json"
    notes.unlink(missing_ok=True)
    promise = "The package's own tests pass where it is installed, the public kit's among them."
    if not env.tests.is_dir():
        raise Broken("no-tests", promise, "There is no folder `tests`.")
    words = (
        "-m",
        "pytest",
        "-qx",
        "-p",
        "minisgl.course.lab.grader.pytest_probe",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    )
    try:
        settings = {"MINISGL_PROBE": str(notes), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        ran = env.run(*words, "--rootdir", str(env.tests), str(env.tests), env=settings)
    except subprocess.TimeoutExpired as error:
        raise Broken("hangs", promise, "They were not done after 60 s.") from error
    if "No module named pytest" in ran.stderr:
        raise Missing("this gate runs its tests with pytest, which is not installed: pip install -e '.[lab]'")
    if not notes.is_file():
        last = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()][-1:]
        raise Broken("no-tests", promise, f"pytest did not run: {''.join(last)}")
    seen = json.loads(notes.read_text())
    if seen["failed"]:
        name, said = seen["failed"][0]
        cause = "unfinished" if "NotImplementedError" in said else "tests-fail"
        raise Broken(cause, promise, f"{Path(name).name}: {said.removeprefix('E').strip()}")
    if not seen["passed"]:
        raise Broken("no-tests", promise, "pytest found no test in it.")
    known = [plugin["options"] for plugin in plugins(env)]
    kits = {KITS[group][1] for options in known for group, _ in options if group in KITS}
    if kits - seen["kits"].keys():
        seen_ = f"{len(seen['passed'])} tests passed; none is {' or '.join(sorted(kits - seen['kits'].keys()))}'s."
        raise Broken("no-kit", promise, seen_)
    kit = "".join(f", {n} of them {name}'s" for name, n in seen["kits"].items())
    return f"{len(seen['passed'])} of its tests pass{kit}"


def conformance(student: Student) -> str:
    """The kit as it is, on what the installed plugin builds."""
    env, said = environment(student.path), []
    for plugin in plugins(env):
        for group, name in plugin["options"]:
            if group not in KITS:
                continue
            told = ask(env, "kit", group, name)
            if "failed" in told:
                what = told["failed"].removeprefix("test_").replace("_", " ")
                raise Broken("kit", f"{what[0].upper()}{what[1:]}.", f"{group}={name}: {told['said']}")
            said.append(f"{group}={name} passes {len(told['passed'])} tests of {KITS[group][1]}")
    return "; ".join(said) or "there is no public kit for its hook"


class Installed(Served):
    """A server of an environment that has the package installed: no word of it in ``plugins=``."""

    def __init__(self, lab: Lab, path: Path, sha256: str):
        super().__init__(lab, path, sha256)
        self.method = ""

    def __enter__(self) -> Served:
        words = ["model=tutor", "num_pages=512"]
        try:
            env = environment(self.path)
            plugin = plugins(env)[0]
            self.path, self.sha256 = Path(plugin["path"]), plugin["sha256"]
            for group, name in plugin["options"][:1]:
                more, self.method = SERVE.get(group, ([], ""))
                words += [f"{group}={name}", *more]
            places = {"PYTHONPATH": str(env.site)}
            self.server = Server(*words, timeout=patience(START_SECONDS), attached=True, env=places)
        except (Broken, Missing) as why:
            self._failure = why
        except RuntimeError as error:
            said = [line for line in str(error).splitlines()[1:] if line.strip()]
            seen = f"python -m minisgl {' '.join(words[2:])} did not come up: {' | '.join(said[-2:]) or error}"
            self._failure = Broken("dies" if said else "hangs", "The real server starts with it.", seen)
        return self


SERVED = Installed


def serves(served: Installed) -> str | None:
    """As in every lab; what is called depends on the hook."""
    return facts([served.method] if served.method else []).run(served)


GATES = (
    Gate("package", "it builds, and installs into a clean environment", package, limit=90.0),
    Gate("found", "minisgl finds it there by its entry point", found, limit=90.0),
    Gate("tests", "its own tests pass there", tests, limit=150.0),
    Gate("conformance", "the public kit passes on what it builds", conformance, limit=90.0),
    Gate("server", "the real server answers right with it, and calls it", serves, served=True),
)
