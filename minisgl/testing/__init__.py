"""What proves the promises: the simulated engine, and kits that a plugin can be tested with."""

from __future__ import annotations

from minisgl.testing.sim import SimCounts, SimEngine
from minisgl.testing.truth import Ask, Expected, expected_output
from minisgl.testing.violation import RULES, SimViolation

__all__ = ["RULES", "Ask", "Expected", "SimCounts", "SimEngine", "SimViolation", "expected_output"]
