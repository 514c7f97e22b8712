"""The package ``aiperf``: its command line, which measures a server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cases import MODEL, URL, case, run


@case
def measured_chat() -> Any:
    """Return the number of output tokens of each request."""
    words = [
        "profile", "--model", MODEL, "--url", URL.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming",
        "--request-count", "3", "--concurrency", "1", "--synthetic-input-tokens-mean", "20",
        "--output-tokens-mean", "8", "--extra-inputs", "ignore_eos:true", "--tokenizer", os.environ["MINISGL_MODEL"],
        "--use-server-token-count", "--ui", "none", "--output-artifact-dir", "artifacts",
    ]  # fmt: skip
    os.environ.pop("HF_HUB_OFFLINE")  # with it, aiperf does not look for a tokenizer in a folder
    ran = subprocess.run([str(Path(sys.executable).with_name("aiperf")), *words], capture_output=True, text=True)
    found = list(Path("artifacts").glob("**/profile_export.jsonl"))
    assert found, ran.stdout[-3000:] + ran.stderr[-3000:]
    lines = [json.loads(line) for line in found[0].read_text().splitlines()]
    assert not any(line.get("error") for line in lines), lines
    return [line["metrics"]["output_sequence_length"]["value"] for line in lines]


run()
