# causes: few
# gate: states
# seen: the state is empty
"""This automaton looks twice at each node for the nodes that reach an end, and not until nothing changes."""


class Automaton:
    def prepare(self):
        network = self.network
        self._ends = {last for _, last in network.rules.values()}
        self._useful = {network.end, *self._ends}
        for node in [*reversed(range(len(network.reads)))] * 2:
            after = [end for _, _, end in network.reads[node]] + network.skips[node]
            after += [end for name, end in network.calls[node] if network.rules[name][0] in self._useful]
            if any(end in self._useful for end in after):
                self._useful.add(node)
