"""How many KV pages fit: from the options, what a page takes, and what the device has left.

Knows bytes, and nothing of models or requests.
"""

from __future__ import annotations

import psutil
import torch

from minisgl.config import Config, ConfigError

CPU_SHARE, CPU_LIMIT = 0.1, 4 << 30
"""On a CPU the machine has other work: this share of its memory, and at most so many bytes (config.memory_ratio)."""


def size_pool(config: Config, page_bytes: int, max_len: int, device: torch.device, reserved: int) -> int:
    """Pages for the KV pool, the scratch page not counted.

    ``page_bytes``: one page in all layers on this rank; ``reserved`` bytes are asked for besides, by the attention
    backend. Never more than ``max_running_requests`` requests of ``max_len`` tokens could fill. Raises `ConfigError`
    where not even a short request fits, or not one as long as ``max_seq_len`` says.
    """
    size = config.page_size
    if config.num_pages is not None:
        pages, why = config.num_pages, f"num_pages={config.num_pages}"
    else:
        room, why = _room(config, device, reserved)
        useful = config.max_running_requests * -(-max_len // size)
        pages = min(room // page_bytes - 1, useful)
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


def _room(config: Config, device: torch.device, reserved: int) -> tuple[int, str]:
    """Bytes for KV, and the option that says so."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free  # weights are loaded by now
        return int(config.memory_ratio * total) - used - reserved, f"memory_ratio={config.memory_ratio}"
    total = psutil.virtual_memory().total
    share = min(int(CPU_SHARE * total), CPU_LIMIT)
    return share - reserved, f"{CPU_SHARE} of this machine's memory (at most {CPU_LIMIT >> 30} GiB)"
