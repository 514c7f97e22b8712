"""Start the server, kill its scheduler with SIGKILL, and print what an open request and `/health` reply."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

server = subprocess.Popen(
    [sys.executable, "-m", "minisgl", "model=tutor", "device=cpu", "server.port=0"],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
)
url = next(line for line in server.stdout if "ready" in line).split()[-1]


def get(path, body=None):
    request = urllib.request.Request(
        url + path, body and json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


samples = [
    dict(re.findall(r'(\w+)="([^"]*)"', line))
    for line in get("/metrics")[1].splitlines()
    if line.startswith("minisgl_process{")
]
processes = {sample["pid"]: sample["process"] for sample in samples}
print("processes:", ", ".join(sorted(processes.values())))
print("/health before:", get("/health")[0])

question = {
    "model": "tutor",
    "max_tokens": 1900,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": "Hello"}],
}
answer = []
waiting = threading.Thread(target=lambda: answer.append(get("/v1/chat/completions", question)))
waiting.start()
time.sleep(0.5)
victim = next(int(pid) for pid, role in processes.items() if role == "scheduler-0")
os.kill(victim, signal.SIGKILL)
killed = time.monotonic()
waiting.join()
print(
    f"the open request got status {answer[0][0]} after {time.monotonic() - killed:.1f} s:",
    json.loads(answer[0][1])["error"]["message"],
)
print("/health after:", get("/health")[0])
print("the server's exit status:", server.wait())
print("processes left:", sum(alive(int(pid)) for pid in processes))
