"""`live=counter`: GET /steps answers with the number of steps that the server has launched."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.server.extension import HttpExtension


@dataclass
class Counter:
    """Counts steps."""

    every: int = 1
    """Tell the API server after this many steps."""

    def build(self):
        return StepsRoute()


class StepsRoute(HttpExtension):
    """The half in the API server's process."""

    steps = 0

    def add_routes(self, router, api):
        api.dispatcher.link.receivers["steps"] = self.receive

        @router.get("/steps")
        async def read_steps() -> dict[str, int]:
            return {"steps": self.steps}

    def receive(self, data):
        self.steps = int(data)


class StepCounter:
    """The half in rank 0's process."""

    def __init__(self, link, every):
        self.link, self.every = link, every

    @hookimpl
    def minisgl_batch_scheduled(self, step):
        if (step.id + 1) % self.every == 0:
            self.link.send("steps", b"%d" % (step.id + 1))


@hookimpl
def minisgl_configs():
    yield "live", "counter", Counter


@hookimpl
def minisgl_observer(config, link):
    if link is not None and isinstance(config.live, Counter):
        return StepCounter(link, config.live.every)
