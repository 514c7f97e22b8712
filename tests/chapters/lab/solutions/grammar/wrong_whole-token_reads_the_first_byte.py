# causes: whole-token
# gate: mask


class Masks:
    def _computed(self, state):
        allowed = np.zeros(self.size, bool)
        for token, text in enumerate(self.tokens):
            allowed[token] = bool(text) and token not in self.end_ids and bool(self.automaton.after(state, text[0]))
        if self.automaton.is_final(state):
            allowed[list(self.end_ids)] = True
        return pack_mask(allowed)
