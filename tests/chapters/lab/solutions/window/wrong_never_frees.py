# causes: never
# gate: behind


class MyManager:
    def clear_behind(self, rows):
        pass
