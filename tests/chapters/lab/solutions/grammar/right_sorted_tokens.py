"""The tokens are sorted, and all tokens behind a dead beginning are left out with a binary search."""

from bisect import bisect_left


class Masks:
    def prepare(self):
        some = [(text, token) for token, text in enumerate(self.tokens) if text and token not in self.end_ids]
        self.texts = [text for text, _ in sorted(some)]
        self.ids = [token for _, token in sorted(some)]

    def mask(self, state):
        if state in self.kept:
            return self.kept[state]
        if len(self.kept) >= KEPT_MASKS:
            self.kept.clear()
        self.kept[state] = self.found(state)
        return self.kept[state]

    def found(self, state):
        allowed = np.zeros(self.size, bool)
        path = [state]
        at = work = 0
        before = b""
        while at < len(self.texts):
            text = self.texts[at]
            same = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), min(len(before), len(text)))
            del path[same + 1 :]
            before = text
            while len(path) <= len(text) and path[-1]:
                work += len(path[-1])
                if work > self.max_work:
                    raise GrammarTooLargeError("too many places")
                path.append(self.automaton.after(path[-1], text[len(path) - 1]))
            if path[-1]:
                allowed[self.ids[at]] = True
                at += 1
                continue
            dead = text[: len(path) - 1]
            at = bisect_left(self.texts, dead + bytes([255]) * 64, at + 1)
        if self.automaton.is_final(state):
            for token in self.end_ids:
                allowed[token] = True
        return pack_mask(allowed)
