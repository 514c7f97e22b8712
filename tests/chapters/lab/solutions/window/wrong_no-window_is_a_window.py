# causes: no-window
# gate: reads


def first_columns(positions, windows, page_size):
    return (np.maximum(positions[:, None] - windows + 1, 0) // page_size).astype(np.int32)
