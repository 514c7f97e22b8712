"""The structure of the project: which way imports point, and what a wheel contains."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    {"utils", "sampling_params", "core", "hooks", "config"},
    {"plugin_manager"},
    {"options"},
    {"message"},
    {"distributed", "attention", "kvcache"},
    {"layers"},
    {"models"},
    {"engine", "scheduler"},
    {"tokenizer"},
    {"outputs"},
    {"server", "llm"},
    {"cluster"},
    {"trace"},
    {"testing"},
    {"bench"},
    {"__init__", "__main__", "shell", "demo"},
    {"chapters"},
    {"lab"},
)
"""The top-level parts of ``minisgl``, lowest first. A part imports from lower layers only; `docs/architecture.md` has
the same list."""

ENTRIES = {
    "minisgl.lab": "minisgl.chapters",
    "minisgl.bench.__main__": "minisgl.chapters.ladder.stages",
    "minisgl.server.cli": "minisgl.cluster.multi_node.start",
}
"""Modules that may import a module of a higher layer, and what they import."""


PLAIN_KINDS = {"attention", "cache", "scheduler", "models"}
"""The folders of plugins of which the plain engine needs a part, so that they are never deleted as a whole."""
OPTIONAL_IN_TESTS = {
    # They put bugs into the scheduler, and some of these bugs are in drafts and masks.
    "tests/scheduler/test_kv_groups.py": {"constraint", "speculation"},
    "tests/scheduler/test_planted.py": {"constraint", "speculation"},
    "tests/scheduler/test_soak.py": {"constraint", "speculation"},
    "tests/scheduler/test_states.py": {"constraint", "speculation"},
    # About the plugins themselves, driven by the whole scheduler.
    "tests/scheduler/test_preparing.py": {"constraint"},
    "tests/scheduler/test_rounds.py": {"speculation"},
    "tests/scheduler/test_speculation.py": {"speculation"},
}
"""Test of `make check` → the folders of plugins without which it is left out."""


def sources(*folders: str) -> Iterator[Path]:
    """Every Python file below the folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).glob("**/*.py")):
            if "__pycache__" not in path.parts:
                yield path


def walk(node: ast.AST, functions: bool) -> Iterator[ast.AST]:
    """Every node that runs: what is only for type checkers is left out, and function bodies without ``functions``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from walk(other, functions)
        elif functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from walk(child, functions)


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


def imports(path: Path, functions: bool = True) -> Iterator[str]:
    """Yield the modules that a file imports, those inside its functions too; submodules by their full name.

    ``importlib.import_module`` with a string counts as an import.
    """
    for node in walk(parsed(path), functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from sorted(names & modules().keys())
            if names - modules().keys():
                yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


@cache
def modules() -> dict[str, Path]:
    """Every module below ``minisgl/`` and ``chapters/`` by its dotted name.

    Folders of chapters begin with a digit; their files are no modules.
    """
    found = {}
    for path in sources("minisgl", "chapters"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "chapters":
            parts = ("minisgl", *parts)
        if all(part.isidentifier() for part in parts):
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def import_graph() -> dict[str, set[str]]:
    """Which module of ``minisgl`` imports which."""
    return {name: {t for t in imports(path) if t in modules() and t != name} for name, path in modules().items()}


def part_of(module: str) -> str:
    """Return the top-level part that a module belongs to; ``__init__`` for the package ``minisgl`` itself."""
    return module.removeprefix("minisgl").lstrip(".").partition(".")[0] or "__init__"


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """One import circle, as a list of modules that begins and ends with the same; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph.get(name, ())):
            if circle := visit(target, [*trail, name]):
                return circle
        done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := visit(name, []))), [])


# ---- what may import what ----------------------------------------------------------------------------


def test_core_names_no_plugin_and_no_gpu_package() -> None:
    gpu = {"flashinfer", "flash_attn", "flash_attn_interface", "tensorrt_llm", "cuda", "cupy", "nccl"}
    for path in sources("minisgl"):
        for name in imports(path):
            if not {"testing", "bench", "shell.py", "demo.py"} & set(path.parts):
                # The kits, the simulation and the benchmarks build shipped plugins by name. Two commands are plugins.
                assert not name.startswith("minisgl.plugins"), f"{path} imports {name}"
            assert name.partition(".")[0] not in gpu, f"{path} imports {name}"


def test_gpu_packages_are_imported_inside_the_factory() -> None:
    """The Triton kernels may import Triton: other modules import them inside functions only."""
    kernels = "minisgl.plugins.kernels.ops.triton"
    for path in sources("plugins"):
        if not path.is_relative_to(ROOT / "plugins" / "kernels" / "ops" / "triton"):
            names = set(imports(path, False))
            assert not {"flashinfer", "flash_attn", "triton"} & {name.partition(".")[0] for name in names}, path
            assert not any(name.startswith(kernels) for name in names), path
        assert not any(name.split(".")[0] in ("plugins", "conf") for name in imports(path)), path


def kinds_needed(path: Path, seen: set[str]) -> set[str]:
    """Return the kinds of plugins without which a file can't be imported; ``seen`` are modules that are followed."""
    found: set[str] = set()
    for name in imports(path, False):
        if name.startswith("minisgl.plugins.") and (ROOT / "plugins" / name.split(".")[2]).is_dir():
            found.add(name.split(".")[2])
        elif name in modules() and name not in seen:
            seen.add(name)
            found |= kinds_needed(modules()[name], seen)
    return found


def test_tests_of_the_core_need_no_optional_plugin() -> None:
    """Any one folder of plugins may be deleted, and `make check` still tests the rest (`tests/conftest.py`)."""
    (line,) = re.findall(r"^CORE_TESTS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    wrong = {}
    for word in line.replace("\\\n", " ").split():
        files = [ROOT / word] if word.endswith(".py") else sorted((ROOT / word).glob("test_*.py"))
        assert files, word
        for path in files:
            name = path.relative_to(ROOT).as_posix()
            needed = kinds_needed(path, set()) - PLAIN_KINDS
            if not name.startswith("tests/plugins/") and needed - OPTIONAL_IN_TESTS.get(name, set()):
                wrong[name] = needed
    assert wrong == {}


def test_no_plugin_imports_another_kind() -> None:
    """Plugins of a kind share code in a folder below the kind's folder. All kinds may import `plugins/kernels`.

    A grammar is a constraint: `plugins/grammar` builds on the base class. So do experts in FP8 on the MoE layer.
    Readers of answers return the parts of which the HTTP APIs make responses.
    """
    parts = "minisgl.plugins.http.apis.answer"
    bases = {
        "grammar": "minisgl.plugins.constraint.base",
        "quantization": "minisgl.plugins.models.experts",
        "tool_parser": parts,
        "reasoning_parser": parts,
    }
    for path in sources("plugins"):
        kind, *rest = path.relative_to(ROOT / "plugins").parts
        allowed = (f"minisgl.plugins.{kind}", "minisgl.plugins.kernels", bases.get(kind, "minisgl.plugins.kernels"))
        for name in imports(path):
            if name.startswith("minisgl.plugins") and rest:
                assert name.startswith(allowed), f"{path} imports {name}"


def test_no_import_points_upwards() -> None:
    """Function-local imports count. Two parts of one layer do not import each other."""
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    wrong = []
    for module, targets in import_graph().items():
        part = part_of(module)
        assert part in level, f"{module}: put minisgl.{part} into LAYERS here, and into docs/architecture.md"
        for target in targets:
            if ENTRIES.get(module) is not None and target.startswith(ENTRIES[module]):
                continue
            other = part_of(target)
            if other != part and level[other] >= level[part] and level[part] > 0:
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_there_is_no_import_circle() -> None:
    """Neither between modules nor between the top-level parts."""
    assert find_circle(import_graph()) == []
    parts: dict[str, set[str]] = {}
    for module, targets in import_graph().items():
        if module not in ENTRIES:
            parts.setdefault(part_of(module), set()).update(
                part_of(t) for t in targets if part_of(t) != part_of(module)
            )
    assert find_circle(parts) == []


def test_the_circle_finder_finds_one() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_nothing_but_its_entries_imports_the_course() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in import_graph().items()
        for target in targets
        if target.startswith("minisgl.chapters")
        and not module.startswith("minisgl.chapters")
        and not target.startswith(ENTRIES.get(module, "none"))
    ]
    for path in sources("plugins", "conf"):
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in imports(path) if "minisgl.chapters" in name]
    assert wrong == []


def test_architecture_page_has_the_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    missing = [name for names in LAYERS for name in names if not name.startswith("__") and f"`{name}`" not in page]
    assert missing == []


# ---- packaging ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build a wheel; return the tree that it was built from, and the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pt", "*.bin")
    for name in ("minisgl", "plugins", "conf", "chapters"):
        shutil.copytree(ROOT / name, tree / name, ignore=skip)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    text = (ROOT / "pyproject.toml").read_text("utf-8")  # a deleted folder of plugins is no package
    packages = re.findall(r'^ +"minisgl\.(plugins[\w.]*)",\n', text, re.MULTILINE)
    for gone in (name for name in packages if not (ROOT / name.replace(".", "/")).is_dir()):
        text = text.replace(f'  "minisgl.{gone}",\n', "")
    (tree / "pyproject.toml").write_text(text, "utf-8")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", folder, tree], check=True)
    (made,) = folder.glob("minisgl-*.whl")
    return tree, made


NO_COURSE = """
import sys
class NoCourse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("minisgl.chapters"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoCourse())
"""


def run_installed(installed: Path, code: str) -> None:
    """Run code in a process that sees the unpacked wheel and not the checkout."""
    lines = "\n".join(line[8:] for line in code.splitlines())
    environment = os.environ | {"PYTHONPATH": str(installed), "CXX": "none"}  # nothing is compiled for this folder
    subprocess.run([sys.executable, "-c", lines, str(installed)], check=True, cwd=installed.parent, env=environment)


def test_the_wheel_holds_every_file_and_works(wheel: tuple[Path, Path], tmp_path: Path) -> None:
    tree, made = wheel
    inside = set(zipfile.ZipFile(made).namelist())
    places = {"minisgl": "minisgl", "plugins": "minisgl/plugins", "conf": "minisgl/conf"}
    places["chapters"] = "minisgl/chapters"
    kinds = {".py", ".yaml", ".json", ".safetensors", ".typed", ".jinja", ".toml", ".cpp", ".cu", ".js", ".css"}
    expected = {
        f"{place}/{path.relative_to(tree / folder).as_posix()}"
        for folder, place in places.items()
        for path in (tree / folder).rglob("*")
        if path.suffix in kinds and "build" not in path.relative_to(tree / folder).parts
    }
    assert expected - inside == set()
    assert made.stat().st_size < 24 * 2**20  # most of it are the four embedded models
    zipfile.ZipFile(made).extractall(tmp_path / "installed")
    run_installed(
        tmp_path / "installed",
        """
        import sys
        import minisgl, minisgl.conf, minisgl.plugins
        from minisgl.models.resolve import resolve_model
        from minisgl.options.compose import compose
        from minisgl.plugin_manager.manager import PluginManager
        assert all(m.__file__.startswith(sys.argv[1]) for m in (minisgl, minisgl.conf, minisgl.plugins)), minisgl
        assert compose(PluginManager.load(light=True), ["stage=6", "experiment=laptop"]).page_size == 16
        assert resolve_model("tutor").is_dir() and str(resolve_model("tutor")).startswith(sys.argv[1])
        """,
    )


def test_a_wheel_without_the_course_serves(wheel: tuple[Path, Path], tmp_path: Path) -> None:
    """The engine, the server and the command line do not need ``chapters/``."""
    _, made = wheel
    installed = tmp_path / "installed"
    zipfile.ZipFile(made).extractall(installed)
    shutil.rmtree(installed / "minisgl" / "chapters")
    # An editable install would find the checkout's copy, in every child process too.
    (installed / "sitecustomize.py").write_text(NO_COURSE)
    run_installed(
        installed,
        """
        import json, sys, urllib.request
        import minisgl
        assert minisgl.__file__.startswith(sys.argv[1])
        try:
            import minisgl.chapters
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError(minisgl.chapters)
        from minisgl.cluster.attached import attached_server
        with attached_server(["model=tutor", "device=cpu"]) as url:
            body = {"model": "tutor", "prompt": "What is a radix cache?", "max_tokens": 4, "temperature": 0}
            request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
        """,
    )


def test_the_version_is_one(wheel: tuple[Path, Path]) -> None:
    from minisgl import __version__

    assert wheel[1].name.startswith(f"minisgl-{__version__}-")
