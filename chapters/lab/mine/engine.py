"""Which parts of a student's engine are the student's own: the finished lab files, and the options that select them.

A lab is *finished* if all its gates were green for the file as it is now: a file that was changed after that is open
again. Where a lab is open, the engine has the shipped part. Reads the folder's saved results, and runs no student's
code.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.catalog import Lab, labs
from minisgl.chapters.lab.folder import Folder
from minisgl.chapters.lab.grader.grade import fingerprint

__all__ = ["Engine", "OwnPart", "module_of", "own_parts", "own_versions", "parts_of"]

EXPERTS_MODEL = "tutor-moe"
"""The shipped model with experts. The shipped model without them is the default."""
SHIPPED_MODELS = ("tutor", EXPERTS_MODEL)
WINDOW_LAB = "window"
"""The lab whose cache is for models with sliding windows. The shipped models have none."""
PAGED_LAB = "paged"
"""The lab whose attention reads the page table on the host, so that no graph can record it."""


@dataclass(frozen=True)
class OwnPart:
    """The state of one lab's file. ``green`` of ``total`` gates are green for the file as it is now.

    ``file`` is None if there is no file. ``changed``: the file is not the one that was graded last. ``stretch`` is the
    last measurement of the lab's number to beat, and whether it was beaten; None if it was not measured for this file.
    ``failed`` are the gates that were run for this file and are red.
    """

    lab: Lab
    file: Path | None
    sha256: str
    green: int
    total: int
    changed: bool = False
    red: str = ""
    stretch: tuple[str, bool] | None = None
    failed: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether every gate is green for the file as it is now."""
        return self.file is not None and 0 < self.total == self.green

    @property
    def path(self) -> Path:
        """The file of a finished lab."""
        assert self.file is not None
        return self.file


def own_parts(folder: Folder) -> list[OwnPart]:
    """Return the state of every lab, in the order of the course."""
    known = folder.recall()
    return [_part(lab, known.get(lab.lab, {}), folder) for lab in labs()]


def _part(lab: Lab, done: dict[str, Any], folder: Folder) -> OwnPart:
    graded = {"path", "sha256", "green", "gates"} <= done.keys()
    path = Path(done["path"]) if graded else folder.path / lab.file
    if not path.exists():
        return OwnPart(lab, None, "", 0, lab.num_gates)
    sha256 = fingerprint(path)
    if not graded:
        return OwnPart(lab, path, sha256, 0, lab.num_gates)
    if sha256 != done["sha256"]:
        return OwnPart(lab, path, sha256, 0, len(done["gates"]), changed=True, red=str(done["gates"][0]))
    red = next((gate for gate in done["gates"] if gate not in done["green"]), "")
    measured = done.get("stretch")
    stretch = None
    if isinstance(measured, dict) and measured.get("sha256") == sha256:
        stretch = str(measured.get("counted", "")), bool(measured.get("beaten"))
    failed = tuple(map(str, done.get("failed", ())))
    return OwnPart(lab, path, sha256, len(done["green"]), len(done["gates"]), red=red, stretch=stretch, failed=failed)


def own_versions(parts: Sequence[OwnPart]) -> dict[str, str]:
    """Return the finished files that a measurement is about: lab → SHA-256."""
    return {part.lab.lab: part.sha256 for part in parts if part.finished}


@dataclass
class Engine:
    """The command line of a student's engine.

    ``used`` are the parts that the server has, and ``left_out`` are the other finished parts, each with the reason.
    ``words`` are the options of ``python -m minisgl``, and ``python_path`` are folders for `PYTHONPATH`.
    """

    used: list[OwnPart] = field(default_factory=list)
    left_out: list[tuple[OwnPart, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    python_path: list[str] = field(default_factory=list)


def parts_of(parts: Sequence[OwnPart], options: Sequence[str] = (), without: Collection[str] = ()) -> Engine:
    """Return the engine with all finished parts that go together.

    ``options`` are more options of the server, which win over those of the labs; ``without`` names labs whose parts are
    left out. Of two parts of the same group, the engine has that of the later lab.
    """
    engine, given = Engine(), {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in options}
    plugins: list[str] = []
    absent = {*without, *([WINDOW_LAB] if given.get("model", "tutor") in SHIPPED_MODELS else [])}
    last = {part.lab.hook: part for part in parts if part.finished and part.lab.lab not in absent and part.lab.words}
    selected: list[str] = []
    needed: dict[str, str] = {}
    for part in parts:
        if not part.finished:
            continue
        reason = _reason(part, last, given, without)
        if reason:
            engine.left_out.append((part, reason))
            continue
        engine.used.append(part)
        if part.path.is_dir():
            module, source = module_of(part.path)
            plugins.append(module)
            engine.python_path.append(source)
            continue
        plugins.append(str(part.path))
        selected += [word for word in part.lab.words if word.partition("=")[0] not in given]
        for word in part.lab.serve:
            name, _, value = word.partition("=")
            if name not in given:
                needed[name] = value
    if "plugins" in given:
        more = given["plugins"].strip("[]")
        plugins += [each for each in more.split(",") if each]
    engine.words = [f"plugins=[{','.join(plugins)}]"] if plugins else []
    engine.words += [*selected, *(f"{name}={value}" for name, value in needed.items())]
    engine.words += [word for word in options if word.lstrip("+").partition("=")[0] != "plugins"]
    return engine


def _reason(
    part: OwnPart, last: dict[str | None, OwnPart], given: dict[str, str], without: Collection[str]
) -> str | None:
    """Return why a finished part is left out of the engine, or None."""
    lab, model = part.lab, given.get("model", "tutor")
    if lab.lab in without:
        return f"--without {lab.lab}"
    if lab.lab == WINDOW_LAB and model in SHIPPED_MODELS:
        return f"the model {model} has no windows"
    if lab.words and last[lab.hook] is not part:
        later = last[lab.hook].lab.lab
        return f"the later lab {later} has a part of the same kind; use --without {later}"
    group, _, name = (lab.words or ["="])[0].partition("=")
    if group and group in given and given[group] != name:
        return f"{group}={given[group]} was asked for"
    if lab.hook == "kernels" and group not in given:
        return "a CPU interprets its kernels, which is slow; add kernels=mine to use it"
    if lab.hook == "graph" and "attention" in last and "attention" not in given and PAGED_LAB not in without:
        return f"no graph can record the attention of lab {PAGED_LAB}; use --without {PAGED_LAB}"
    if lab.hook == "moe" and model == "tutor":
        return f"the model tutor has no experts; add model={EXPERTS_MODEL}"
    if lab.hook == "quantization" and model == EXPERTS_MODEL:
        return f"quantize=int8 is for models without experts, and {EXPERTS_MODEL} has experts"
    if lab.hook == "models" and model != "tutor" and "architecture" not in given:
        return f"it is made for the model tutor, not for {model}"
    if lab.hook == "communicator" and given.get("tp") == "1":
        return "one rank has no sums to exchange; leave out tp=1"
    return None


def module_of(path: Path) -> tuple[str, str]:
    """Return the module of a student's package that minisgl loads, and the folder that contains the module."""
    try:
        project = tomllib.loads((path / "pyproject.toml").read_text("utf-8"))["project"]
        module = str(next(iter(project["entry-points"]["minisgl"].values())))
    except (OSError, ValueError, KeyError, StopIteration):
        module = path.name
    source = path / "src" if (path / "src").is_dir() else path
    return module, str(source.resolve())
