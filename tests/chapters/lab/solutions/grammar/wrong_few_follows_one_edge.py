# causes: few
# gate: states


class Automaton:
    def _closed(self, places):
        network, found = self.network, set()
        for node, stack in places:
            found.add((node, stack))
            found |= {(end, stack) for end in network.skips[node]}
            found |= {(network.rules[name][0], (after, *stack)) for name, after in network.calls[node]}
            if node in self._ends:
                found.add((stack[0], stack[1:]))
        return frozenset(each for each in found if each[0] in self._useful)
