# causes: end-early
# gate: mask


class Masks:
    def prepare(self):
        self._children, self._tokens = [{}], [[]]
        for token, text in enumerate(self.tokens[: self.size]):
            node = 0
            for byte in text:
                child = self._children[node].setdefault(byte, len(self._children))
                if child == len(self._children):
                    self._children.append({})
                    self._tokens.append([])
                node = child
            if text:
                self._tokens[node].append(token)
