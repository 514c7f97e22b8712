# causes: dead-end
# gate: states


class Automaton:
    def _closed(self, places):
        network = self.network
        found = set()
        todo = list(places)
        while todo:
            place = node, stack = todo.pop()
            if place in found:
                continue
            found.add(place)
            if len(found) > MAX_PLACES:
                raise GrammarTooLargeError("too many")
            todo += [(end, stack) for end in network.skips[node]]
            for name, after in network.calls[node]:
                todo.append((network.rules[name][0], (after, *stack)))
            if node in self._ends:
                todo.append((stack[0], stack[1:]))
        return frozenset(place for place in found if network.reads[place[0]] or place == (network.end, ()))
