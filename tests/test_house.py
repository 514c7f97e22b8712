"""The house itself: what is packaged, and which way imports point."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    {"config", "hooks", "core", "utils", "discover", "host", "calls", "options", "completion", "compose", "reference"},
    {"distributed", "message", "kernel"},
    {"layers", "attention", "kvcache", "moe"},
    {"models", "tutor"},
    {"engine"},
    {"scheduler"},
    {"tokenizer", "server", "llm", "bench", "lab", "testing", "trace", "shell", "demo", "site", "__main__"},
)


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).glob("**/*.py")):
            if "__pycache__" not in path.parts:
                yield path


def imports(path: Path, everywhere: bool = True) -> Iterator[str]:
    """Modules that a file imports when it runs; ``everywhere``: within functions too."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not everywhere:
                continue
            yield child
            yield from walk(child)

    for node in walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


# ---- what may import what ----------------------------------------------------------------------------


def test_the_core_names_no_plugin_and_imports_no_gpu_package() -> None:
    gpu = {"flashinfer", "flash_attn", "flash_attn_interface", "tensorrt_llm", "cuda", "cupy", "nccl"}
    for path in sources("minisgl"):
        for name in imports(path):
            assert not name.startswith("minisgl.plugins"), f"{path} imports {name}"
            assert name.partition(".")[0] not in gpu, f"{path} imports {name}"


def test_gpu_packages_are_imported_inside_the_factory() -> None:
    for path in sources("plugins"):
        assert not {"flashinfer", "flash_attn", "triton"} & {n.partition(".")[0] for n in imports(path, False)}, path
        assert not any(name.split(".")[0] in ("plugins", "conf") for name in imports(path)), path


def test_no_plugin_knows_another() -> None:
    for path in sources("plugins"):
        own = "minisgl.plugins." + path.parent.name
        for name in imports(path):
            if name.startswith("minisgl.plugins") and path.parent.name != "plugins":
                assert name.startswith(own), f"{path} imports {name}"


def test_dependencies_point_one_way() -> None:
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    wrong = []
    for path in sources("minisgl"):
        part = path.relative_to(ROOT / "minisgl").parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        assert part in level, f"{path}: put minisgl.{part} into LAYERS here, and into the docs"
        for name in imports(path, everywhere=False):
            target = name.removeprefix("minisgl.").partition(".")[0]
            if name.startswith("minisgl.") and level.get(target, 0) > level[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


# ---- packaging ---------------------------------------------------------------------------------------


def test_the_wheel_holds_every_file_and_works(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pt", "*.bin")
    for folder in ("minisgl", "plugins", "conf", "chapters"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        tree,
    ]
    subprocess.run(command, check=True, timeout=120)
    (wheel,) = tmp_path.glob("minisgl-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    places = {"minisgl": "minisgl", "plugins": "minisgl/plugins", "conf": "minisgl/conf"}
    places["chapters"] = "minisgl/chapters"
    kinds = {".py", ".yaml", ".json", ".safetensors", ".typed", ".jinja", ".toml", ".cpp", ".cu"}
    expected = {
        f"{place}/{path.relative_to(tree / folder).as_posix()}"
        for folder, place in places.items()
        for path in (tree / folder).rglob("*")
        if path.suffix in kinds and "build" not in path.relative_to(tree / folder).parts
    }
    assert expected - inside == set()
    assert wheel.stat().st_size < 20 * 2**20

    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    code = """
        import minisgl, minisgl.conf, minisgl.plugins, sys
        from minisgl.host import Host
        from minisgl.models.resolve import resolve_model
        assert all(m.__file__.startswith(sys.argv[1]) for m in (minisgl, minisgl.conf, minisgl.plugins)), minisgl
        host = Host.load(light=True)
        assert host.compose(["stage=6", "experiment=laptop"]).page_size == 16
        assert resolve_model("tutor").is_dir() and str(resolve_model("tutor")).startswith(sys.argv[1])
    """
    command = [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines()), str(installed)]
    subprocess.run(command, check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)}, timeout=60)
