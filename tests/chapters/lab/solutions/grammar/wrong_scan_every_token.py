# causes: scan
# gate: mask


class Masks:
    def prepare(self):
        pass

    def _computed(self, state):
        allowed = np.zeros(self.size, bool)
        work = 0
        for token, text in enumerate(self.tokens):
            at = state
            for byte in text:
                work += len(at)
                at = self.automaton.after(at, byte)
                if not at:
                    break
            if work > self.max_work:
                raise GrammarTooLargeError("too much")
            allowed[token] = bool(text) and bool(at) and token not in self.end_ids
        if self.automaton.is_final(state):
            allowed[list(self.end_ids)] = True
        return pack_mask(allowed)
