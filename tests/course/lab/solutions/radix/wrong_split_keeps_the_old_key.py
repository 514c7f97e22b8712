# causes: split-links
"""The lower half is filed under the page that the whole edge began with."""


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
