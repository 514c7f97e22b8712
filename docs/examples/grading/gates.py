"""An example of private gates for ``python -m minisgl.lab grade DIR --gates gates.py``. Students do not get this file.

``GATES`` maps the name of a lab to its private gates. A gate's function gets a
`minisgl.chapters.lab.grader.gate.Student`. It returns a few words about what it checked, or raises `Broken`.
"""

from __future__ import annotations

from minisgl.chapters.lab.grader.gate import Broken, Gate, Student
from minisgl.scheduler import Plan, Running
from minisgl.scheduler.cache_manager import AdmissionCost
from minisgl.scheduler.planner import StepBudget


def run_alone(student: Student) -> str:
    """Check the plan of a step in which one request decodes and no other request is there."""
    policy = student.make(student.config(order="fcfs"))
    budget = StepBudget(8, 0, 4, 0, lambda uid: AdmissionCost(pages=0, growth=0))
    plan = policy.plan([], [Running(7, 0, 0, 0, 0)], budget)
    if not isinstance(plan, Plan) or [tuple(row) for row in plan.rows] != [(7, 1)]:
        promise = "A request that decodes alone has a row of one token."
        raise Broken("decodes-late", promise, f"The plan is {plan!r:.80}.", request=7)
    return "request 7 has one row of one token"


GATES = {"policy": [Gate("alone", "a request that is alone decodes", run_alone, points=2.0)]}
