"""The box before each lab in the chapters: what to write, how much, how long it takes, and what the gates check."""

from __future__ import annotations

from minisgl.chapters.lab.catalog import Lab, find
from minisgl.chapters.lab.museum.pieces import pieces
from minisgl.chapters.lab.skeletons import skeleton, solution

__all__ = ["answer_lines", "box"]


def answer_lines(lab: Lab) -> int:
    """Return how many lines of code the reference has in the parts that a student writes, without comments."""
    return _code(solution(lab)) - _code(skeleton(lab))


def _code(text: str) -> int:
    lines = [line.strip() for line in text.splitlines()]
    return sum(bool(line) and not line.startswith("#") and line != "raise NotImplementedError" for line in lines)


def box(name: str) -> str:
    """Return the box of a lab as Markdown."""
    lab = find(name)
    lines = [f"| Lab `{lab.lab}` | {lab.title} |", "| --- | --- |"]
    if lab.parts:
        parts = "<br>".join(f"`{part.name.partition('.')[2]}`: {part.says}" for part in lab.parts)
        lines.append(f"| you write | {parts} |")
        lines.append(f"| size | the reference has {answer_lines(lab)} lines of code in these parts |")
    lines.append(f"| time | about {lab.minutes} minutes (an estimate) |")
    if lab.plugin:
        lines.append(f"| serve your file | `{lab.command}` |")
    gates = "<br>".join(f"*{gate.name}*: {gate.says}" for gate in lab.gates)
    lines.append(f"| the gates check | {gates} |")
    broken = [piece.name for piece in pieces() if piece.lab == name]
    if broken:
        names, first = ", ".join(f"`{each}`" for each in broken), f"`python -m minisgl.lab break {broken[0]}`"
        what, such_as = (
            ("a fault of a real engine", ":") if len(broken) == 1 else ("faults of real engines", ", such as")
        )
        lines.append(
            f"| break | {names}: {what}, to find and mend ([the museum](../../docs/museum.md)){such_as} {first} |"
        )
    if lab.stretch:
        lines.append(f"| a number to beat | {lab.stretch.says} It is not graded. |")
    return "\n".join(lines)
