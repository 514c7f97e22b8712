# causes: after-end
# gate: answer


class MyMatcher:
    def _after(self, state, token):
        for byte in self.masks_of.tokens[token] if token < len(self.masks_of.tokens) else b"":
            state = self.masks_of.automaton.after(state, byte)
        return state
