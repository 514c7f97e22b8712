# causes: padding-page
"""Padding is zeros: position 0 of slot 0, written to page 0."""


class Buffers:
    def padding(self):
        return np.array([0, 0, 0, 0, 1], np.int32)
