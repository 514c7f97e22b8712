"""``python -m minisgl.course.lab.generate``: the skeletons and the list of labs, as they are kept beside the chapters.

A student's copy comes from the same function at ``start``; what is kept is for readers, and for the tests, which fail
when it is not what the shipped plugins give.
"""

from __future__ import annotations

import sys
from pathlib import Path

from minisgl.course.lab.catalog import CAUSES, Lab, labs
from minisgl.course.lab.grader.gate_process import LOADS
from minisgl.course.lab.skeletons import skeleton


def files() -> dict[str, str]:
    """Path below the repository's root → text."""
    made = {"docs/reference/labs.md": listing()}
    for lab in labs():
        if lab.plugin:
            made[f"chapters/{lab.chapter}/skeletons/{lab.file}"] = skeleton(lab)
    return made


def listing() -> str:
    """Every lab: what is written, what is graded, what goes wrong."""
    lines = [
        "# Labs\n",
        "<!-- Written by `make reference`. -->\n",
        "`python -m minisgl.lab start NAME` writes a lab's skeleton into your folder, `test NAME` grades what you make "
        "of it, `hint NAME` gives one more hint each time, `diff NAME` shows the reference beside your file, `status` "
        "what is done. Each lab swaps one plugin of the real server.\n",
        "| lab | chapter | hook | what it is about |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| [`{lab.lab}`](#{lab.lab}) | {lab.chapter[:2]} | {lab.hook or 'any'} | {lab.title} |" for lab in labs()
    ]
    lines += ["\nWhat can go wrong in any lab:\n", *(f"- `{cause}`: {text}" for cause, text in CAUSES.items())]
    for lab in labs():
        lines += ["", *_section(lab)]
    return "\n".join(lines) + "\n"


def _section(lab: Lab) -> list[str]:
    gates = [*([LOADS] if lab.plugin else []), *lab.gates]
    lines = [f"## {lab.lab}\n", f"{lab.title}. {lab.says}\n"]
    if lab.plugin:
        lines.append(f"The reference is `{lab.plugin}`; yours is `{' '.join([f'plugins={lab.file}', *lab.words])}`.\n")
    lines += [f"- `{part.name}`: {part.says} ({len(part.hints)} hints)" for part in lab.parts]
    lines += ["\n| gate | what it checks |", "| --- | --- |"]
    lines += [f"| {gate.name} | {gate.says} |" for gate in gates]
    if lab.causes:
        lines += ["", *(f"- `{cause}`: {text}" for cause, text in lab.causes.items())]
    return lines


def main(root: Path) -> None:
    """Write them all below ``root``, and remove skeletons of labs that are no more."""
    made = files()
    for old in root.glob("chapters/*/skeletons/*.py"):
        if old.relative_to(root).as_posix() not in made:
            old.unlink()
    for name, text in made.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
