"""The kit, which tests a policy of minisgl by mistake."""

from minisgl.scheduler import SchedulerPolicy
from minisgl.testing.drive import make_plugin
from minisgl.testing.policy import PolicyConformance


class TestMyPolicy(PolicyConformance):
    def make(self) -> SchedulerPolicy:
        return make_plugin("scheduler", "mixed")
