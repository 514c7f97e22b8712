# causes: again
# gate: mask


class Masks:
    def prepare(self):
        self.first = {}
        for token, text in enumerate(self.tokens):
            if text and token not in self.end_ids:
                self.first.setdefault(text[0], []).append(token)

    def _computed(self, state):
        allowed = np.zeros(self.size, bool)
        work = 0
        for byte, tokens in self.first.items():
            work += len(state)
            begun = self.automaton.after(state, byte)
            if not begun:
                continue
            for token in tokens:
                at = begun
                for each in self.tokens[token][1:]:
                    work += len(at)
                    at = self.automaton.after(at, each)
                    if not at:
                        break
                if work > self.max_work:
                    raise GrammarTooLargeError("too much")
                allowed[token] = bool(at)
        if self.automaton.is_final(state):
            allowed[list(self.end_ids)] = True
        return pack_mask(allowed)
