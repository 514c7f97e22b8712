"""What holds for all tests: one thread for each process. The models are tiny, and servers, ranks and xdist's workers
share the cores; with more threads than cores, torch spends most of its time waiting for its own."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
