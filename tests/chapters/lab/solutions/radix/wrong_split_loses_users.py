# causes: split-users
# gate: split
"""After a split, the upper node has no users in this cache, although every user of the lower node reads it too."""


class MyCache:
    def _split(self, node, at):
        cut = at * self.page_size
        upper = Node(node.parent, node.ids[:cut], node.pages[:at])
        node.parent.children[self._page(node.ids, 0)] = upper
        node.ids, node.pages, node.parent = node.ids[cut:], node.pages[at:], upper
        upper.children[self._page(node.ids, 0)] = node
        upper.stamp = node.stamp
        self._nodes += 1
        return upper
