# causes: victims, needless
# gate: room
"""Only batch requests are retracted: here the order puts waiting requests before all running ones."""


class MyPolicy:
    def make_room(self, prompts: Sequence[Request], running: Sequence[Running], budget: Budget) -> Sequence[int]:
        urgent = [r for r in running if self.is_interactive(r)]
        batch = [r for r in running if not self.is_interactive(r)]
        return budget.retractions([*prompts, *urgent, *batch])
