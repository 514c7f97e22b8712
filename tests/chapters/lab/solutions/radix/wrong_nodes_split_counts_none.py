# causes: nodes
# gate: split
"""This cache forgets to count the node that a split makes."""


class MyCache:
    def _split(self, node, at):
        cut = at * self.page_size
        upper = Node(node.parent, node.ids[:cut], node.pages[:at])
        node.parent.children[self._page(node.ids, 0)] = upper
        node.ids, node.pages, node.parent = node.ids[cut:], node.pages[at:], upper
        upper.children[self._page(node.ids, 0)] = node
        upper.users, upper.stamp = node.users, node.stamp
        return upper
