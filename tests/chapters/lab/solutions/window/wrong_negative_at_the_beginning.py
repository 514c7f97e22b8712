# causes: negative
# gate: reads


def first_columns(positions, windows, page_size):
    first = (positions[:, None] - windows + 1) // page_size
    return np.where(windows < 0, 0, first).astype(np.int32)
