"""Exit with SystemExit(0)."""


def plan(self, waiting, running, budget):
    raise SystemExit(0)
