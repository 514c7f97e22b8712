# causes: other, drafts-stay, several, wrong
# gate: answer


class MyMatcher:
    def __init__(self, masks_of):
        self.masks_of = masks_of
        masks_of.state = masks_of.automaton.start()

    def advance(self, tokens):
        for token in tokens:
            self.masks_of.state = self._after(self.masks_of.state, token)

    def masks(self, drafts):
        states = [self.masks_of.state]
        for draft in drafts:
            states.append(self._after(states[-1], draft))
        return np.stack([self.masks_of.mask(state) for state in states])
