"""Import the reference."""


def plan(self, waiting, running, budget):
    from minisgl.plugins.scheduler.mixed import MixedPolicy

    return MixedPolicy(self.order).plan(waiting, running, budget)
