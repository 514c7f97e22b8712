"""Test tools: a simulated engine without a model, and conformance kits that plugin authors run on their plugins."""

from __future__ import annotations

from minisgl.testing.sim import SimCounts, SimEngine
from minisgl.testing.truth import Expected, SimRequest, expected_output
from minisgl.testing.violation import RULES, SimViolation

__all__ = ["RULES", "Expected", "SimCounts", "SimEngine", "SimRequest", "SimViolation", "expected_output"]
