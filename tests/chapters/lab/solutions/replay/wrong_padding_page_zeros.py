# causes: padding-page
# gate: buffers
"""This graph runner pads with zeros: position 0 of request-pool row 0, whose KV is written to page 0."""


class Buffers:
    def padding(self):
        return np.array([0, 0, 0, 0, 1], np.int32)
