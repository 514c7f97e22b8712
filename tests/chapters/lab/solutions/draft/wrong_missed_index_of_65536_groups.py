# causes: missed
# gate: cost
"""."""


class Text:
    def append(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            if end >= self.match_tokens and len(self.after) < 65536:
                self.after[tuple(self.tokens[end - self.match_tokens :])] = end
            self.tokens.append(int(token))

    def copy(self, count: int) -> list[int]:
        end = len(self.tokens)
        if end < self.match_tokens:
            return []
        start = self.after.get(tuple(self.tokens[end - self.match_tokens :]))
        if start is None:
            return []
        guesses = self.tokens[start : start + count]
        while len(guesses) < count:
            guesses.append(guesses[len(guesses) - (end - start)])
        return guesses


class MyProposer(DraftProposer):
    def admitted(self, req: Req) -> None:
        text = self.new_text()
        text.append(req.tokens().tolist())
        self.texts[req.uid] = text

    def removed(self, req: Req) -> None:
        self.texts.pop(req.uid, None)

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts = []
        for req, position, limit in zip(reqs, positions, limits, strict=True):
            text = self.texts[req.uid]
            unread = position - len(text.tokens)
            count = min(limit, self.max_drafts)
            drafts.append(text.copy(unread + count)[unread:] if count > 0 else [])
        return drafts
