# causes: changes, unhashable, unequal
# gate: states


class Places(frozenset):
    def __new__(cls, places):
        made = super().__new__(cls, places)
        made.now = made
        return made

    def __bool__(self):
        return len(self.now) > 0

    def __hash__(self):
        return hash(frozenset(self.now))

    def __eq__(self, other):
        return frozenset.__eq__(self.now, other.now)


class Automaton:
    def start(self):
        return Places(self._closed([(0, ())]))

    def after(self, state, byte):
        reads = self.network.reads
        edges = [(end, s) for n, s in frozenset(state.now) for low, high, end in reads[n] if low <= byte <= high]
        state.now = Places(self._closed(edges))
        return state

    def is_final(self, state):
        return any(place == (self.network.end, ()) for place in frozenset.__iter__(state.now))
