"""Number of pages of the KV pool, from the options, the bytes of a page and the free memory of the device.

Knows sizes in bytes, and nothing of models or requests.
"""

from __future__ import annotations

import psutil
import torch

from minisgl.config import Config, ConfigError

CPU_SHARE, CPU_LIMIT = 0.1, 4 << 30
"""Limits of the KV pool on a CPU: a share of the machine's memory, and a number of bytes. The smaller limit applies.
``memory_ratio`` applies to GPUs only."""


def size_pool(config: Config, page_bytes: int, max_len: int, device: torch.device, reserved: int) -> int:
    """Return the number of pages of the KV pool, not counting the scratch page.

    ``page_bytes`` is the size of one page in all layers on this rank. ``reserved`` is a number of bytes that are
    left free, for what is allocated later: the workspace of the attention backend, the page table and the state of the
    sampler. If ``num_pages`` is not given, the result is at most the number of pages that ``max_running_requests``
    requests of ``max_len`` tokens can fill.

    Raises `ConfigError` if the pool would hold fewer than 2 tokens, or if the option ``max_seq_len`` is given and a
    request of that length does not fit.
    """
    size = config.page_size
    if config.num_pages is not None:
        pages, why = config.num_pages, f"num_pages={config.num_pages}"
    else:
        available, why = _available_bytes(config, device, reserved)
        usable_pages = config.max_running_requests * -(-max_len // size)
        pages = min(available // page_bytes - 1, usable_pages)  # one page is the scratch page
    if pages * size < 2:
        raise ConfigError(
            f"No KV pool fits: {why} leaves {max(pages, 0)} pages of {size} tokens, {page_bytes / 2**20:.1f} MiB each. "
            "Raise num_pages or memory_ratio, or choose a smaller model or dtype."
        )
    if config.max_seq_len is not None and pages * size < max_len:
        raise ConfigError(
            f"max_seq_len={config.max_seq_len} needs {-(-max_len // size)} pages of {size} tokens for one request, but "
            f"{why} leaves {pages}. Lower max_seq_len, or raise num_pages or memory_ratio."
        )
    return pages


def _available_bytes(config: Config, device: torch.device, reserved: int) -> tuple[int, str]:
    """Return the bytes available for KV, and the option or rule that determines this number, for error messages."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free  # includes the weights, which are loaded before the pool is sized
        return int(config.memory_ratio * total) - used - reserved, f"memory_ratio={config.memory_ratio}"
    total = psutil.virtual_memory().total
    share = min(int(CPU_SHARE * total), CPU_LIMIT)
    return share - reserved, f"{CPU_SHARE} of this machine's memory (at most {CPU_LIMIT >> 30} GiB)"
