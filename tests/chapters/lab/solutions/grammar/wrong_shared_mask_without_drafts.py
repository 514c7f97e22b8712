# causes: shared
# gate: answer


class MyMatcher:
    def masks(self, drafts):
        if not drafts:
            return self.masks_of.mask(self.state)[None]
        states = [self.state]
        for draft in drafts:
            states.append(self._after(states[-1], draft))
        return np.stack([self.masks_of.mask(state) for state in states])
