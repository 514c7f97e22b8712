# causes: cached-spare
# gate: behind
class MyManager:
    def clear_behind(self, rows):
        table, size = self.request_table, self.spec.page_size
        borders = table.num_computed_tokens[rows] // size * size
        firsts = first_columns(borders, table.windows, size)
        for row, new in zip(rows.tolist(), firsts.tolist(), strict=True):
            for group, first in enumerate(new):
                columns = slice(int(table.firsts[row, group]), first)
                if columns.start < first:
                    table.firsts[row, group] = first
                    table.is_cached[row, group, columns] = False
                    self.add_spares(row, group, table.tables[row, group, columns].tolist())
