# causes: raises, wrong, missed, few, other, retracted, run
# gate: turn
"""Requests are told apart by the last 10 bits of their uid."""


class MyProposer(DraftProposer):
    def admitted(self, req: Req) -> None:
        self.texts[req.uid % 1024] = self.new_text()
        self.texts[req.uid % 1024].append(req.tokens().tolist())

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        for req, run in zip(reqs, tokens, strict=True):
            self.texts[req.uid % 1024].append(run)

    def removed(self, req: Req) -> None:
        self.texts.pop(req.uid % 1024, None)

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts = []
        for req, position, limit in zip(reqs, positions, limits, strict=True):
            text = self.texts[req.uid % 1024]
            unread = position - len(text.tokens)
            drafts.append(text.copy(unread + limit)[unread:])
        return drafts
