# causes: limit
# gate: rows
"""An interactive request that is left out for its prefix does not count as open, so the step is large."""


class MyPolicy:
    def prompt_tokens(self, is_open, decode_rows, budget):
        if not is_open:
            return budget.tokens
        return min(max(self.step_tokens - decode_rows, -(-self.step_tokens // 4)), budget.tokens)

    def plan(self, waiting, running, budget):
        queue = list(islice(order_waiting(waiting, "fcfs"), budget.rows + AHEAD))
        running = sorted(running, key=urgency)
        rows = {r.uid: 1 for r in running if not r.num_remaining_tokens and budget.grant(r, 1)}
        begun = [r for r in running if r.num_remaining_tokens]
        urgent = [r for r in begun + queue if self.is_interactive(r)]
        batch = [r for r in (begun + queue if budget.rows else begun) if not self.is_interactive(r)]
        is_open = any(map(self.is_interactive, chain(running, queue)))
        tokens = self.prompt_tokens(is_open, len(rows), budget)
        used, without_room = self.grant(urgent, tokens - self.kept_tokens(tokens, batch), budget, rows)
        retract = []
        if without_room:
            retract = self.make_room(without_room, running, budget)
            batch = [r for r in batch if isinstance(r, Running) and r.uid not in retract]
        for request in without_room if retract else []:
            rows[request.uid] = min(wanted_tokens(request), tokens - used)
            used += rows[request.uid]
        self.grant(batch, tokens - used, budget, rows)
        return Plan([(uid, n) for uid, n in rows.items() if n and uid not in retract], retract)
