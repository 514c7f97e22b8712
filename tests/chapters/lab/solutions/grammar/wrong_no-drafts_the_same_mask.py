# causes: no-drafts
# gate: answer


class MyMatcher:
    def masks(self, drafts):
        return np.stack([self.masks_of.mask(self.state)] * (1 + len(drafts)))
