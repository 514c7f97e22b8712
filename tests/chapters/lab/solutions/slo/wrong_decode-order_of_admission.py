# causes: decode-order
# gate: rows
"""The most urgent decode row comes first: here the earliest admitted one gets the last free page."""


class MyPolicy:
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        queue: list[Request] = list(islice(order_waiting(waiting, "fcfs"), budget.rows + AHEAD))
        by_admission, running = running, sorted(running, key=urgency)
        rows = {r.uid: 1 for r in by_admission if not r.num_remaining_tokens and budget.grant(r, 1)}
        begun: list[Request] = [r for r in running if r.num_remaining_tokens]
        urgent = [r for r in begun + queue if self.is_interactive(r)]
        batch = [r for r in (begun + queue if budget.rows else begun) if not self.is_interactive(r)]
        is_open = any(map(self.is_interactive, chain(running, queue, waiting[:1])))
        tokens = self.prompt_tokens(is_open, len(rows), budget)
        used, without_room = self.grant(urgent, tokens - self.kept_tokens(tokens, batch), budget, rows)
        retract: Sequence[int] = []
        if without_room:
            retract = self.make_room(without_room, running, budget)
            batch = [r for r in batch if isinstance(r, Running) and r.uid not in retract]
        for request in without_room if retract else []:
            rows[request.uid] = min(wanted_tokens(request), tokens - used)
            used += rows[request.uid]
        self.grant(batch, tokens - used, budget, rows)
        return Plan([(uid, n) for uid, n in rows.items() if n and uid not in retract], retract)
