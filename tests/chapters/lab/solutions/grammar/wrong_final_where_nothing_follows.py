# causes: final
# gate: states


class Automaton:
    def is_final(self, state):
        return not any(self.network.reads[node] for node, _ in state)
