"""SVG pictures of a trace. Each mark carries the values of its event in ``data-`` attributes."""

from __future__ import annotations

from minisgl.trace.draw.gap import gap
from minisgl.trace.draw.pages import pages
from minisgl.trace.draw.staircase import staircase
from minisgl.trace.draw.svg import NARROW, figure
from minisgl.trace.draw.timeline import timeline, timelines
from minisgl.trace.draw.tree import tree

__all__ = ["NARROW", "figure", "gap", "pages", "staircase", "timeline", "timelines", "tree"]
