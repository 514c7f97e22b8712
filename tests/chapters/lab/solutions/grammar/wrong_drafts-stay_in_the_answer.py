# causes: drafts-stay
# gate: answer


class MyMatcher:
    def masks(self, drafts):
        found = [self.masks_of.mask(self.state)]
        for draft in drafts:
            self.advance([draft])
            found.append(self.masks_of.mask(self.state))
        return np.stack(found)
