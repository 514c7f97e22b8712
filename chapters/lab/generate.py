"""``python -m minisgl.chapters.lab.generate``: write the skeletons and the reference page of the labs.

The skeletons are committed beside the chapters for readers. A student's copy comes from the same function, when the
student runs ``start``. A test fails if the committed files differ from what the shipped plugins give.
"""

from __future__ import annotations

import sys
from pathlib import Path

from minisgl.chapters.lab.catalog import CAUSES, Lab, labs
from minisgl.chapters.lab.grader.gate_process import LOADS
from minisgl.chapters.lab.museum.pieces import pieces
from minisgl.chapters.lab.skeletons import skeleton


def files() -> dict[str, str]:
    """Return every generated file: path below the repository's root → text."""
    texts = {"docs/reference/labs.md": listing()}
    for lab in labs():
        if lab.plugin:
            texts[f"chapters/{lab.chapter}/skeletons/{lab.file}"] = skeleton(lab)
    return texts


def listing() -> str:
    """Return the reference page: the parts, gates and causes of every lab."""
    lines = [
        "# Labs\n",
        "<!-- Written by `make reference`. -->\n",
        "Each lab replaces one plugin of the real server. `python -m minisgl.lab` has these commands:\n",
        "- `start NAME` writes the lab's skeleton into your folder.",
        "- `test NAME` grades your file.",
        "- `hint NAME` prints one more hint each time.",
        "- `diff NAME` compares your file with the reference solution.",
        "- `status` shows your results and your engine.",
        "- `serve`, `ladder`, `promises` and `card` are about [your whole engine](../my-engine.md).",
        "- `arena` lets policies or caches [play against each other](../my-engine.md#the-arena).",
        "- `break` is about [the museum](../museum.md): it shows a piece, checks an answer and grades a mended file.\n",
        "| lab | chapter | hook | title |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| [`{lab.lab}`](#{lab.lab}) | {lab.chapter[:2]} | {lab.hook or 'any'} | {lab.title} |" for lab in labs()
    ]
    lines += ["\nCauses of a red gate in any lab:\n", *(f"- `{cause}`: {text}" for cause, text in CAUSES.items())]
    for lab in labs():
        lines += ["", *_section(lab)]
    lines += ["", *museum()]
    return "\n".join(lines) + "\n"


def museum() -> list[str]:
    """Return the section about the museum pieces."""
    lines = ["## The museum\n", "[The museum](../museum.md) explains how to work on a piece.\n",
             "| piece | after the lab | what happened | public source |", "| --- | --- | --- | --- |"]  # fmt: skip
    for piece in pieces():
        sources = ", ".join(f"[{source.name}]({source.url})" for source in piece.sources)
        lines.append(f"| `{piece.name}` | `{piece.lab}` | {piece.title}: {piece.says} | {sources} |")
    return lines


def _section(lab: Lab) -> list[str]:
    gates = [*([LOADS] if lab.plugin else []), *lab.gates]
    lines = [f"## {lab.lab}\n", f"**{lab.title}.** {lab.says}\n"]
    if lab.plugin:
        words = " ".join([f"plugins={lab.file}", *lab.words])
        lines.append(f"The reference solution is `{lab.plugin}`. `{words}` selects your plugin.\n")
    lines += [f"- `{part.name}`: {part.says} ({len(part.hints)} hints)" for part in lab.parts]
    lines += _graded(lab)
    lines += ["\n| gate | what it checks |", "| --- | --- |"]
    lines += [f"| {gate.name} | {gate.says} |" for gate in gates]
    if lab.stretch:
        lines.append(f"\nA number to beat, which is not graded: {lab.stretch.says}")
    if lab.causes:
        lines += ["\nCauses of a red gate:\n", *(f"- `{cause}`: {text}" for cause, text in lab.causes.items())]
    return lines


def _graded(lab: Lab) -> list[str]:
    """Return which plugins the clean installation of ``lab grade`` lacks, and which stay although they help."""
    gone = [f"`{module}`" for module in lab.forbidden if module not in lab.kept]
    stay = [f"`{module}`" for module in lab.kept]
    where = "The grader's process judges every gate" if lab.data else "Some gates are judged in the student's process"
    text = f"`lab grade` runs without these plugins: {', '.join(gone)}. " if gone else ""
    text += f"{', '.join(stay)} stays, because the gates compare with it. " if stay else ""
    return [f"\n{text}{where} ([Teach](../teach.md#what-a-grade-proves))."]


def main(root: Path) -> None:
    """Write every generated file below ``root``, and remove the skeletons of labs that no longer exist."""
    texts = files()
    for old in root.glob("chapters/*/skeletons/*.py"):
        if old.relative_to(root).as_posix() not in texts:
            old.unlink()
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
