# causes: form
# gate: answer


class MyMatcher:
    def masks(self, drafts):
        return self.masks_of.mask(self.state).copy()
