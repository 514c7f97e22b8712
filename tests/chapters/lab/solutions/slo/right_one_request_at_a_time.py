"""Room is made for one interactive request in a step, and the prompts are generators."""


class MyPolicy:
    def kept_tokens(self, tokens, batch):
        kept = 0
        for request in batch:
            kept += wanted_tokens(request)
            if kept >= int(tokens * self.batch_share):
                return int(tokens * self.batch_share)
        return kept

    def grant(self, prompts, tokens, budget, rows):
        granted = 0
        for request in prompts:
            if granted >= tokens:
                return granted, ()
            n = budget.grant(
                request, tokens - granted if wanted_tokens(request) > tokens - granted else wanted_tokens(request)
            )
            if not n:
                return granted, (request,)
            rows[request.uid] = n
            granted += n
        return granted, ()

    def make_room(self, prompts, running, budget):
        classes = [[], []]
        for r in running:
            classes[not self.is_interactive(r)].append(r)
        # The granted prompts find room without retractions, so the first result is for the first prompt without room.
        for n in range(1, len(prompts) + 1):
            if retract := budget.retractions(classes[0] + list(prompts[:n]) + classes[1]):
                return retract
        return []
