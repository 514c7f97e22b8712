"""The package ``guidellm``: its command line, which measures a server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cases import MODEL, URL, case, run


def measure(data: str, path: str) -> Any:
    """Return the numbers of successful and failed requests, and the output tokens of each."""
    report = Path("report.json")
    backend = f"kind=openai_http,target={URL.removesuffix('/v1')},model={MODEL},request_format={path}"
    words = [
        "run", "--backend", backend, "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3",
        "--data", data, "--tokenizer", f"kind=huggingface_auto,model={os.environ['MINISGL_MODEL']}",
        "--output", f"kind=json,path={report}", "--disable-console",
    ]  # fmt: skip
    ran = subprocess.run([str(Path(sys.executable).with_name("guidellm")), *words], capture_output=True, text=True)
    assert report.exists(), ran.stdout[-2000:] + ran.stderr[-4000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"], requests["errored"][0]
    return [request["output_metrics"]["text_tokens"] for request in requests["successful"]]


@case
def measured_chat() -> Any:
    return measure("kind=synthetic_text,prompt_tokens=20,output_tokens=8", "/v1/chat/completions")


run()
