"""Stacks are linked pairs, dead nodes are found by repeated passes, transitions are kept, and a mask is a recursion."""


class Automaton:
    def prepare(self):
        network = self.network
        self.lasts = {last for _, last in network.rules.values()}
        good = {network.end} | self.lasts
        while True:
            more = set(good)
            for node in range(len(network.reads)):
                if any(end in more for _, _, end in network.reads[node]) or any(e in more for e in network.skips[node]):
                    more.add(node)
                for name, end in network.calls[node]:
                    if end in more and network.rules[name][0] in more:
                        more.add(node)
            if more == good:
                break
            good = more
        self.good = good
        self.steps = {}

    def start(self):
        return self.reach([(0, None)])

    def after(self, state, byte):
        key = state, byte
        if key not in self.steps:
            if len(self.steps) > 50_000:
                self.steps.clear()
            edges = []
            for node, stack in state:
                for low, high, end in self.network.reads[node]:
                    if low <= byte <= high:
                        edges.append((end, stack))
            self.steps[key] = self.reach(edges)
        return self.steps[key]

    def is_final(self, state):
        return any(node == self.network.end and stack is None for node, stack in state)

    def reach(self, places):
        found, todo = set(), list(places)
        for place in todo:
            if place in found or place[0] not in self.good:
                continue
            found.add(place)
            if len(found) > MAX_PLACES:
                raise GrammarTooLargeError("too many places")
            node, stack = place
            for end in self.network.skips[node]:
                todo.append((end, stack))
            for name, end in self.network.calls[node]:
                if end in self.good:
                    todo.append((self.network.rules[name][0], (end, stack)))
            if node in self.lasts:
                todo.append(stack)
        return frozenset(found)


class Masks:
    def prepare(self):
        self.root = {}
        for token, text in enumerate(self.tokens):
            if text and token not in self.end_ids:
                node = self.root
                for byte in text:
                    node = node.setdefault(byte, {})
                node.setdefault(None, []).append(token)

    def mask(self, state):
        if state not in self.kept:
            self.budget = self.max_work
            tokens = list(self.walk(self.root, state))
            if self.automaton.is_final(state):
                tokens += self.end_ids
            allowed = np.zeros(self.size, bool)
            allowed[tokens] = True
            self.kept[state] = pack_mask(allowed)
            if len(self.kept) > KEPT_MASKS:
                self.kept.popitem(last=False)
        return self.kept[state]

    def walk(self, node, state):
        for byte, child in node.items():
            if byte is None:
                yield from child
                continue
            self.budget -= len(state)
            if self.budget < 0:
                raise GrammarTooLargeError("too many places")
            after = self.automaton.after(state, byte)
            if after:
                yield from self.walk(child, after)


class MyMatcher:
    def advance(self, tokens):
        for token in tokens:
            self.state = self.follow(self.state, token)

    def masks(self, drafts):
        masks = np.zeros((1 + len(drafts), -(-self.masks_of.size // 32)), np.int32)
        state = self.state
        masks[0] = self.masks_of.mask(state)
        for i, draft in enumerate(drafts):
            state = self.follow(state, draft)
            masks[i + 1] = self.masks_of.mask(state)
        return masks

    def follow(self, state, token):
        if token in self.masks_of.end_ids or token >= len(self.masks_of.tokens) or not self.masks_of.tokens[token]:
            return frozenset()
        for byte in self.masks_of.tokens[token]:
            state = self.masks_of.automaton.after(state, byte)
        return state
