# causes: split-stamp
# gate: split
"""The upper part of a split edge was never used, says its stamp."""


class MyCache:
    def _split(self, node, at):
        cut = at * self.page_size
        upper = Node(node.parent, node.ids[:cut], node.pages[:at])
        node.parent.children[self._page(node.ids, 0)] = upper
        node.ids, node.pages, node.parent = node.ids[cut:], node.pages[at:], upper
        upper.children[self._page(node.ids, 0)] = node
        upper.users = node.users
        self._nodes += 1
        return upper
