# causes: quadratic
# gate: match


class MyCache:
    def match(self, key):
        size, groups = self.spec.page_size, len(self.needed)
        nodes = [self.roots.get(key.namespace) or Node(None, key.namespace, groups)]
        for at in range(len(key.ids) // size):
            child = nodes[-1].children.get(key.ids[at * size : (at + 1) * size].tobytes())
            if child is None:
                break
            nodes.append(child)
        longest = 0
        for n in range(1, len(nodes)):
            if all(
                nodes[at + 1].pages[group] != ABSENT
                for group in range(groups)
                for at in range(max(n - self.needed[group], 0), n)
            ):
                longest = n
        pages = np.full((longest, groups), self.spec.num_pages, np.int32)
        used = []
        for group in range(groups):
            for at in range(max(longest - self.needed[group], 0), longest):
                pages[at, group] = nodes[at + 1].pages[group]
                used.append(nodes[at + 1].pages[group])
        return MatchResult(Path(nodes[: longest + 1], used), pages, self.count_unused(used))
