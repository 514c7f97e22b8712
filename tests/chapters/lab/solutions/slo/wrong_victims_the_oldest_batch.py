# causes: victims
# gate: room
"""The least urgent requests are retracted: these are the most urgent batch requests."""


class MyPolicy:
    def make_room(self, prompts: Sequence[Request], running: Sequence[Running], budget: Budget) -> Sequence[int]:
        urgent = [r for r in running if self.is_interactive(r)]
        batch = [r for r in running if not self.is_interactive(r)]
        return budget.retractions([*urgent, *prompts, *batch[::-1]])
