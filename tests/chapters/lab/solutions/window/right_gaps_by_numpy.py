"""The pages of the walk become an array, and a gap is found by the last column in which a page is missing."""


class MyCache:
    def match(self, key):
        size = self.spec.page_size
        root = self.roots.get(key.namespace)
        nodes = [root if root is not None else Node(None, key.namespace, len(self.needed))]
        for start in range(0, len(key.ids) - size + 1, size):
            child = nodes[-1].children.get(key.ids[start : start + size].tobytes())
            if child is None:
                break
            nodes.append(child)
        table = np.array([node.pages for node in nodes[1:]], np.int32).reshape(len(nodes) - 1, len(self.needed))
        ends = np.arange(1, len(table) + 1)[:, None]
        # For each length, one more than the last column before it that lacks the page of the group.
        gaps = np.maximum.accumulate(np.where(table == ABSENT, ends, 0), axis=0)
        first = np.maximum(ends - np.array(self.needed, np.int64), 0)
        good = np.flatnonzero((gaps <= first).all(axis=1))
        count = int(good[-1]) + 1 if len(good) else 0
        pages = table[:count].copy()
        for group, needed in enumerate(self.needed):
            pages[: max(count - needed, 0), group] = self.spec.num_pages
        used = pages[pages < self.spec.num_pages].tolist()
        return MatchResult(Path(nodes[: count + 1], used), pages, self.count_unused(used))


class MyManager:
    def clear_behind(self, rows):
        table = self.request_table
        for row in rows.tolist():
            computed = int(table.num_computed_tokens[row])
            border = np.array([computed - computed % self.spec.page_size], np.int32)
            for group, first in enumerate(first_columns(border, table.windows, self.spec.page_size)[0].tolist()):
                for column in range(int(table.firsts[row, group]), first):
                    page = int(table.tables[row, group, column])
                    table.firsts[row, group] = column + 1
                    if table.is_cached[row, group, column]:
                        table.is_cached[row, group, column] = False
                        self.unlock_later([page])
                    else:
                        self.add_spares(row, group, [page])
