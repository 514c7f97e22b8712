# gate: reads
# gate: match
"""Of each group, the first page of the gapless end is remembered at every node; the length is searched from the end."""


def tail_pages(window, page_size):
    if window < 0:
        return ALL
    return (window - 2) // page_size + 1 if window > 1 else 0


def first_columns(positions, windows, page_size):
    found = np.zeros((len(positions), len(windows)), np.int32)
    for i, position in enumerate(positions):
        for group, window in enumerate(windows):
            if window >= 0 and position >= window:
                found[i, group] = (position - window + 1) // page_size
    return found


class MyCache:
    def match(self, key):
        size, groups = self.spec.page_size, len(self.needed)
        path, begins = [self.roots.get(key.namespace) or Node(None, key.namespace, groups)], [[0] * groups]
        while (end := len(path) * size) <= len(key.ids):
            child = path[-1].children.get(key.ids[end - size : end].tobytes())
            if child is None:
                break
            path.append(child)
            begins.append([len(path) - 1 if p == ABSENT else b for p, b in zip(child.pages, begins[-1], strict=True)])
        count = len(path) - 1
        while any(b > max(count - n, 0) for b, n in zip(begins[count], self.needed, strict=True)):
            count -= 1
        pages, used = np.full((count, groups), self.spec.num_pages, np.int32), []
        for group, needed in enumerate(self.needed):
            for at in range(max(count - needed, 0), count):
                pages[at, group] = path[at + 1].pages[group]
                used.append(path[at + 1].pages[group])
        return MatchResult(Path(path[: count + 1], used), pages, self.count_unused(used))
