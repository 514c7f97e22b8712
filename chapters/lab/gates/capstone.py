"""Gates of lab `capstone`: a package is built, installed into a clean environment, found, tested and served there."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.catalog import Lab
from minisgl.chapters.lab.folder import STATE_FOLDER
from minisgl.chapters.lab.grader.clean_environment import (
    BuildFailed,
    CleanEnvironment,
    clean_environment,
    undeclared,
)
from minisgl.chapters.lab.grader.gate import Broken, Gate, Missing, Stretch, Student, StudentError
from minisgl.chapters.lab.grader.installed_package import KITS
from minisgl.chapters.lab.grader.server_gate import QUESTIONS, Served, facts
from minisgl.chapters.lab.grader.tutor_runs import installed_plugin
from minisgl.testing.serving import patient_timeout

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

# minisgl loads the modules that installed packages name here.
[project.entry-points.minisgl]
capstone = "my_capstone"

[tool.setuptools.packages.find]
where = ["src"]
"""

PLUGIN = '''\
"""`scheduler=capstone`: your own plugin. It may implement any hook; this file begins as a scheduling policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.scheduler import Budget, Plan, Running, SchedulerPolicy, Waiting


@dataclass
class Capstone:
    """Your plugin in one line: `--help` prints this text."""

    def build(self) -> SchedulerPolicy:
        return MyPolicy()


class MyPolicy:
    """Describe here what your policy does."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        # TODO capstone: write your plugin, for this group or for another one (docs/plugins.md lists the groups).
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "capstone", Capstone
'''

TESTS = '''\
"""The public conformance kit of the hook. Add tests for everything else that your plugin promises."""

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

A plugin for minisgl, as a package. After `pip install .`, the command `python -m minisgl scheduler=capstone` uses it.

    python -m minisgl.lab test capstone     # builds the package, installs it into a clean environment, tests it there
"""

SERVE: dict[str, tuple[list[str], str]] = {
    "scheduler": ([], "plan"),
    "cache": ([], "match"),
    "attention": ([], "forward"),
    "moe": (["model=tutor-moe", "server.served_model_name=tutor"], "forward"),
    "communicator": (["tp=2"], "all_reduce"),
}
"""Group → (more options that make a server use a plugin of the group, a method of the plugin that is then called)."""


def skeleton() -> dict[str, str]:
    """Return the files that ``start`` writes: a complete package whose plugin is not written yet."""
    return {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        "src/my_capstone/__init__.py": PLUGIN,
        "tests/test_my_capstone.py": TESTS,
    }


def environment(path: Path) -> CleanEnvironment:
    """Return the clean environment with the package, in the student's ``.minisgl-lab`` folder.

    Raise `Broken` if the package can't be built, and `Missing` if its build backend is not installed.
    """
    if not path.is_dir():
        raise Broken("build", "The package can be built.", f"{path.name} is a file; a package is a folder.")
    try:
        return clean_environment(path, path.parent / STATE_FOLDER / "clean")
    except BuildFailed as error:
        raise Broken("build", "The package can be built.", error.why) from error


def inspect_installed(env: CleanEnvironment, *words: str, seconds: float = 40.0) -> dict[str, Any]:
    """Run `minisgl.chapters.lab.grader.installed_package` in the environment and return its JSON result.

    Raise `Broken` if the command fails or takes longer than ``seconds``.
    """
    try:
        result = env.run("-m", "minisgl.chapters.lab.grader.installed_package", *words, seconds=seconds)
    except subprocess.TimeoutExpired as error:
        seen = f"The inspection `{' '.join(words)}` did not end within {seconds:.0f} s."
        raise Broken("hangs", "The code returns within its time limit.", seen) from error
    if result.returncode:
        last = [line for line in result.stderr.splitlines() if line.strip()][-1:]
        raise Broken("installed", "The package loads in the environment in which it is installed.", "".join(last))
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def plugins(env: CleanEnvironment) -> list[dict[str, Any]]:
    """Return the plugins that the package adds to minisgl. Raise `Broken` if there is none."""
    promise = "minisgl finds the plugin of the installed package by its entry point."
    known = env.tests.parent / "found.json"
    result = json.loads(known.read_text()) if known.is_file() else inspect_installed(env, "found", env.dist)
    known.write_text(json.dumps(result))
    if "error" in result:
        missing = re.search(r"there is no module '(\w+)[\w.]*'", result["error"])
        there = missing is not None and any((env.site / f"{missing[1]}{end}").exists() for end in ("", ".py"))
        raise Broken("entry-point" if there else "installed", promise, result["error"])
    if not result["plugins"]:
        groups = ", ".join(result["groups"])
        has = f"The package has entry points for the groups {groups}." if groups else "The package has no entry point."
        raise Broken("entry-point", promise, f"{has} The group must be `minisgl`.")
    found: list[dict[str, Any]] = result["plugins"]
    outside = [plugin for plugin in found if not Path(plugin["path"]).is_relative_to(env.site.resolve())]
    if outside:
        seen = f"{outside[0]['module']} was imported from {outside[0]['path']}, not from the installed package."
        raise Broken("installed", promise, seen)
    return found


def installed(path: Path) -> dict[str, Any]:
    """Build and install the package, and return its first plugin, with the folder ``site`` that contains it."""
    env = environment(path)
    return {**plugins(env)[0], "site": str(env.site)}


def package(student: Student) -> str:
    """Build the package and install it."""
    env = environment(student.path)
    return f"{env.dist} is built and installed"


def found(student: Student) -> str:
    """Check that minisgl finds the package's plugins, and that its imports are declared. List the plugins."""
    names, env = [], environment(student.path)
    found = plugins(env)
    if (other := undeclared(env)) is not None:
        module, dist = other
        seen = f"{module} imports a module of {dist}, and pyproject.toml does not list it."
        raise Broken("undeclared", "pip installs every package that the plugin imports.", seen)
    for plugin in found:
        options = [f"{group}={name}" for group, name in plugin["options"]]
        names.append(", ".join(options) or f"{plugin['module']} ({len(plugin['hooks'])} hooks)")
    return "; ".join(names)


def tests(student: Student) -> str:
    """Run the package's own tests in the environment, from a copy of its folder `tests`, without pytest plugins."""
    env = environment(student.path)
    record = env.tests.parent / "probe.json"
    record.unlink(missing_ok=True)
    promise = "The package's own tests, which include the public kit, pass in the environment with the package."
    if not env.tests.is_dir():
        raise Broken("no-tests", promise, "The package has no folder `tests`.")
    words = (
        "-m",
        "pytest",
        "-qx",
        "-p",
        "minisgl.chapters.lab.grader.pytest_probe",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    )
    try:
        settings = {"MINISGL_PROBE": str(record), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        ran = env.run(*words, "--rootdir", str(env.tests), str(env.tests), env=settings)
    except subprocess.TimeoutExpired as error:
        raise Broken("hangs", promise, "The tests did not end within 60 s.") from error
    if "No module named pytest" in ran.stderr:
        raise Missing("this gate runs the package's tests with pytest, which is not installed: pip install -e '.[lab]'")
    if not record.is_file():
        last = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()][-1:]
        raise Broken("no-tests", promise, f"pytest did not run: {''.join(last)}")
    results = json.loads(record.read_text())
    if results["failed"]:
        name, message = results["failed"][0]
        cause = "unfinished" if "NotImplementedError" in message else "tests-fail"
        raise Broken(cause, promise, f"{Path(name).name}: {message.removeprefix('E').strip()}")
    if not results["passed"]:
        raise Broken("no-tests", promise, "pytest found no test in the folder `tests`.")
    options = [option for plugin in plugins(env) for option in plugin["options"]]
    missing = sorted({KITS[group][1] for group, _ in options if group in KITS} - results["kits"].keys())
    if missing:
        seen = f"{len(results['passed'])} tests passed; none of them belongs to the kit {' or '.join(missing)}."
        raise Broken("no-kit", promise, seen)
    names = {*(plugin["module"].partition(".")[0] for plugin in plugins(env)), *(name for _, name in options)}
    source = "".join(path.read_text() for path in env.tests.rglob("*.py"))
    if results["kits"] and not any(name in source for name in names):
        seen = f"The kit ran, but no test names the plugin ({' or '.join(sorted(names))}): it tested another one."
        raise Broken("no-kit", promise, seen)
    kit = "".join(f", {n} of them from {name}" for name, n in results["kits"].items())
    return f"{len(results['passed'])} of its tests pass{kit}"


def conformance(student: Student) -> str:
    """Run the public kit, unchanged, on the object that the installed plugin builds."""
    env, passed = environment(student.path), []
    for plugin in plugins(env):
        for group, name in plugin["options"]:
            if group not in KITS:
                continue
            result = inspect_installed(env, "kit", group, name)
            kit = KITS[group][1]
            if "failed" in result:
                promise = f"The plugin passes the test `{result['failed']}` of {kit}."
                raise Broken("kit", promise, f"{group}={name}: {result['message']}")
            passed.append(f"{group}={name} passes {len(result['passed'])} tests of {kit}")
    return "; ".join(passed) or "no public kit exists for the plugin's hook"


class Installed(Served):
    """A server in an environment with the package installed. The server gets no option ``plugins=``."""

    def __init__(self, lab: Lab, path: Path, sha256: str):
        super().__init__(lab, path, sha256)
        self.method = ""
        self.hooks: list[str] = []

    def __enter__(self) -> Served:
        words = ["model=tutor", "num_pages=512"]
        try:
            plugin = self.run_there(installed_plugin, self.lab.lab, str(self.path))
            self.path, self.sha256, self.hooks = Path(plugin["path"]), plugin["sha256"], plugin["hooks"]
            for group, name in plugin["options"][:1]:
                more, self.method = SERVE.get(group, ([], ""))
                words += [f"{group}={name}", *more]
            variables = {"PYTHONPATH": plugin["site"]}
            self.begin(words, env=variables)
        except (Broken, Missing) as why:
            self._failure = why
        except StudentError as error:
            self._failure = error.broken
        return self


SERVED = Installed
REGISTERING = ("minisgl_configs", "minisgl_models", "minisgl_observer")
"""Hooks that minisgl calls at the start, whether or not it uses the plugin."""


def serves(served: Installed) -> str | None:
    """Run the gate that every lab has for the server. The method that must be called depends on the plugin's hook."""
    if served.method:
        return facts([served.method]).run(served)
    facts([]).run(served)
    return called_hooks(served)


def called_hooks(served: Installed) -> str:
    """Return the hooks and methods of the package that the server has called. Raise `Broken` if there are none.

    The calls that register options and make an observer do not count: they happen in a server without requests too.
    """
    until = time.monotonic() + patient_timeout(3.0)
    while True:
        found = {
            process: {call: n for call, n in calls.items() if n and call not in REGISTERING}
            for process, calls in served.calls().items()
        }
        texts = [f"{call} {int(n)}× in {process}" for process, calls in found.items() for call, n in calls.items()]
        if texts:
            return ", ".join(texts) + ", as /metrics counts"
        if time.monotonic() > until:
            seen = (
                f"The server answered {len(QUESTIONS)} questions and called no hook of {served.path.name}. The hooks "
                f"are {', '.join(served.hooks)}. Implement a hook that the server calls for these questions."
            )
            raise Broken("never-called", "The server calls the plugin of the package.", seen)
        time.sleep(0.1)


GATES = (
    Gate("package", "the package can be built and installed into a clean environment", package, limit=90.0),
    Gate("found", "minisgl finds the plugin in this environment by its entry point", found, limit=90.0),
    Gate("tests", "the package's own tests pass in this environment", tests, limit=150.0),
    Gate("conformance", "the installed plugin passes the public conformance kit", conformance, limit=90.0),
    Gate("server", "the real server gives right answers and calls the plugin", serves, served=True),
)


# ---- the number to beat -------------------------------------------------------------------------------------------

MOST_WORK, TIMES = 0.78, "times the work of the shipped parts"
"""The number to beat. The shipped parts with the other order of the queue reach 0.74."""


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Compare the work of the student's policy and cache with that of the shipped ones, on traces that no file knows.

    The parts are those of the package, and those of the finished labs in the same folder.
    """
    from minisgl.chapters.lab.arena.together import together
    from minisgl.chapters.lab.folder import Folder
    from minisgl.chapters.lab.mine.engine import own_parts

    found = together(student.path, own_parts(Folder(student.path.parent)), student.random)
    files = f"with {' and '.join(found.files)}" if found.files else "without a policy or a cache of yours"
    counted = f"{found.times:.2f} {TIMES}: {found.computed:,} prompt tokens, {found.steps:,} steps, {files}"
    return counted, round(found.times, 2) <= MOST_WORK


STRETCH = Stretch(
    "When many requests with common handbooks wait at once, policy and cache decide together what is computed twice. "
    "The work is the computed prompt tokens, and 183 for each step. That of `mixed` and `radix` has the number 1.00. "
    f"Reach {MOST_WORK} with your engine: the policy or the cache of your package, and those of your finished labs. "
    "The traces are new in each run.",
    measure_stretch,
)
