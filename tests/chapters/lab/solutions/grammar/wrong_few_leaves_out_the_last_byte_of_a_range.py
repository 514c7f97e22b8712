# causes: few
# gate: states


class Automaton:
    def after(self, state, byte):
        reads = self.network.reads
        return self._closed((end, s) for node, s in state for low, high, end in reads[node] if byte in range(low, high))
