# causes: namespace-stays
# gate: counts
"""."""


class MyCache:
    def match(self, key: Key) -> MatchResult:
        node, used = (self._root(key.namespace), 0)
        pages: list[I32] = []
        at = unlocked = 0
        end = len(key.ids) // self.page_size
        while at < end:
            child = node.children.get(self._page(key.ids, at))
            if child is None:
                break
            node = child
            used = self._common(node.ids, key.ids[at * self.page_size :])
            pages.append(node.pages[:used])
            if node.users == 0:
                unlocked += used
            at += used
            if used < len(node.pages):
                break
        return MatchResult(Handle(node, used), np.concatenate(pages) if pages else _NONE, unlocked)

    def lock(self, handle: Handle) -> None:
        if handle.used < len(handle.node.pages):
            handle.node = self._split(handle.node, handle.used)
        node: Node | None = handle.node
        while node is not None:
            if node.users == 0:
                self.evictable_pages -= len(node.pages)
            node.users += 1
            node = node.parent

    def unlock(self, handle: Handle) -> None:
        self._clock += 1
        node: Node | None = handle.node
        while node is not None:
            node.users -= 1
            node.stamp = self._clock
            if node.users == 0:
                self.evictable_pages += len(node.pages)
                self._offer(node)
            node = node.parent

    def _split(self, node: Node, at: int) -> Node:
        parent, cut = (node.parent, at * self.page_size)
        assert parent is not None
        upper = Node(parent, node.ids[:cut].copy(), node.pages[:at].copy())
        upper.users, upper.stamp = (node.users, node.stamp)
        parent.children[self._page(upper.ids, 0)] = upper
        node.parent, node.ids, node.pages = (upper, node.ids[cut:].copy(), node.pages[at:].copy())
        upper.children[self._page(node.ids, 0)] = node
        self._nodes += 1
        return upper

    def evict(self, pages: int) -> I32:
        evicted: list[I32] = []
        while pages > 0 and (entry := self._leaves.pop()):
            stamp, node = entry
            if stamp != node.stamp or not self._is_candidate(node):
                continue
            kept = max(len(node.pages) - pages, 0)
            taken = node.pages[kept:]
            evicted.append(taken)
            pages -= len(taken)
            self.total_pages -= len(taken)
            self.evictable_pages -= len(taken)
            if kept:
                node.ids, node.pages = (node.ids[: kept * self.page_size].copy(), node.pages[:kept].copy())
                self._offer(node)
            else:
                parent = node.parent
                del parent.children[self._page(node.ids, 0)]
                node.parent = None
                self._nodes -= 1
                if self._is_candidate(parent):
                    self._leaves.push(parent)
        return np.concatenate(evicted) if evicted else _NONE
