# causes: keep
# gate: mask


class Masks:
    def mask(self, state):
        return self._computed(state)
