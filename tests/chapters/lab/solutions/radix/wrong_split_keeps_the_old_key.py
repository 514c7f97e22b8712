# causes: split-links
# gate: split
"""After a split, this cache files the lower node under the first page of the old edge instead of its own first page."""


class MyCache:
    def _split(self, node, at):
        cut = at * self.page_size
        first = self._page(node.ids, 0)
        upper = Node(node.parent, node.ids[:cut], node.pages[:at])
        node.parent.children[first] = upper
        node.ids, node.pages, node.parent = node.ids[cut:], node.pages[at:], upper
        upper.children[first] = node
        upper.users, upper.stamp = node.users, node.stamp
        self._nodes += 1
        return upper
