# causes: several
# gate: answer


class MyMatcher:
    def advance(self, tokens):
        if tokens:
            self.state = self._after(self.state, tokens[-1])
