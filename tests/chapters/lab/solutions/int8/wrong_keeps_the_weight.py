# causes: keeps
# gate: model


class BlocksLayer:
    def keep_packed(self):
        self.packed = pack(self.weight.detach())
