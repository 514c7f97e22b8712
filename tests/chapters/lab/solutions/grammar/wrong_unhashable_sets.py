# causes: unhashable
# gate: states


class Automaton:
    def _closed(self, places):
        network, useful = self.network, self._useful
        found = set()
        todo = list(places)
        while todo:
            place = node, stack = todo.pop()
            if place in found or node not in useful:
                continue
            found.add(place)
            if len(found) > MAX_PLACES:
                raise GrammarTooLargeError("too many")
            todo += [(end, stack) for end in network.skips[node]]
            for name, after in network.calls[node]:
                if after in useful:
                    todo.append((network.rules[name][0], (after, *stack)))
            if node in self._ends:
                todo.append((stack[0], stack[1:]))
        return {place for place in found if network.reads[place[0]] or place == (network.end, ())}
