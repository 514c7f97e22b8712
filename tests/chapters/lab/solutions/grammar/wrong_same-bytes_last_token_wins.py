# causes: same-bytes
# gate: mask


class Masks:
    def _computed(self, state):
        allowed = np.zeros(self.size, bool)
        if self.automaton.is_final(state):
            allowed[[token for token in self.end_ids if token < self.size]] = True
        todo, work = [(0, state)], 0
        while todo:
            node, at = todo.pop()
            work += len(at) * len(self._children[node])
            if work > self.max_work:
                raise GrammarTooLargeError("too much")
            for byte, child in self._children[node].items():
                after = self.automaton.after(at, byte)
                if after:
                    allowed[self._tokens[child][-1:]] = True
                    todo.append((child, after))
        return pack_mask(allowed)
