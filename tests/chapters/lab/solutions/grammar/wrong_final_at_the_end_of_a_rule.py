# causes: final
# gate: states


class Automaton:
    def is_final(self, state):
        ends = {self.network.end} | self._ends
        return any(node in ends or set(self.network.skips[node]) & self._ends for node, _ in state)
