# causes: dead-end
# gate: states


class Automaton:
    def prepare(self):
        network = self.network
        self._ends = {last for _, last in network.rules.values()}
        self._useful = {network.end, *self._ends}
        grown = True
        while grown:
            before = len(self._useful)
            for node in range(len(network.reads)):
                after = [end for _, _, end in network.reads[node]] + network.skips[node]
                after += [end for _, end in network.calls[node]]
                if any(end in self._useful for end in after):
                    self._useful.add(node)
            grown = len(self._useful) > before
