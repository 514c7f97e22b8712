# causes: few, idle, quarter
# gate: rows
"""Every running request counts as a decode row, also one whose prompt is partly computed."""

from collections.abc import Sequence
from itertools import chain, islice

from minisgl.scheduler import Budget, Plan, Running, Waiting
from minisgl.scheduler.order import order_waiting


class MyPolicy:
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        # 2. All decode rows, the most urgent first. They come before all prompts. Of the waiting requests, read only as
        #    many as the step can admit, and `AHEAD` more.
        queue: list[Request] = list(islice(order_waiting(waiting, "fcfs"), budget.rows + AHEAD))
        running = sorted(running, key=urgency)
        rows = {r.uid: 1 for r in running if not r.num_remaining_tokens and budget.grant(r, 1)}
        # 3. The prompts of each class: those that are partly computed come before waiting requests. A waiting batch
        #    request needs a free row; an interactive one may get the row of a batch request.
        begun: list[Request] = [r for r in running if r.num_remaining_tokens]
        urgent = [r for r in begun + queue if self.is_interactive(r)]
        batch = [r for r in (begun + queue if budget.rows else begun) if not self.is_interactive(r)]
        # 4. The interactive prompts get all prompt tokens but those that are kept, the batch prompts what is left.
        is_open = any(map(self.is_interactive, chain(running, queue)))
        tokens = self.prompt_tokens(is_open, len(running), budget)
        used, without_room = self.grant(urgent, tokens - self.kept_tokens(tokens, batch), budget, rows)
        # 5. While an interactive request waits for room, no batch request is admitted: it would take the room.
        retract: Sequence[int] = []
        if without_room:
            retract = self.make_room(without_room, running, budget)
            batch = [r for r in batch if isinstance(r, Running) and r.uid not in retract]
        # 6. If requests are retracted, the scheduler grants all rows again: name rows for those that get the room. The
        #    tokens of retracted decode rows may stay unused.
        for request in without_room if retract else []:
            rows[request.uid] = min(wanted_tokens(request), tokens - used)
            used += rows[request.uid]
        self.grant(batch, tokens - used, budget, rows)
        return Plan([(uid, n) for uid, n in rows.items() if n and uid not in retract], retract)
