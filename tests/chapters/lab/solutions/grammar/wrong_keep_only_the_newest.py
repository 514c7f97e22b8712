# causes: keep
# gate: mask
class Masks:
    def mask(self, state):
        if state not in self.kept:
            self.kept = {state: self._computed(state)}
        return self.kept[state]
