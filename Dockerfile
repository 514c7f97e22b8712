# syntax=docker/dockerfile:1
# The minisgl server in a container.
#
#   docker build --target cpu -t minisgl:cpu .
#   docker run --rm --init -p 127.0.0.1:1919:1919 minisgl:cpu model=tutor cache=radix
#
#   docker build --target cuda -t minisgl:cuda .
#   docker run --rm --init -p 127.0.0.1:1919:1919 --gpus all --ipc host minisgl:cuda model=Qwen/Qwen3-0.6B tp=2
#
# The words after the image's name are minisgl's options. Inside the container the server listens on every address;
# `-p 127.0.0.1:…` lets only this machine reach it. Leave server.port at 1919: the health check asks that port.

ARG PYTHON=3.11
ARG CUDA=13.0.1

# The wheel holds minisgl, and plugins/, conf/ and chapters/ as minisgl.plugins, minisgl.conf and minisgl.chapters.
FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY minisgl minisgl/
COPY plugins plugins/
COPY conf conf/
COPY chapters chapters/
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# ---- cpu ---------------------------------------------------------------------------------------------

FROM python:${PYTHON}-slim AS cpu-packages
# pip prefers the CPU build here to the CUDA build of the same version on PyPI.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PATH=/opt/minisgl/bin:$PATH
COPY constraints.txt /tmp/
# torch alone first: this layer stays cached while minisgl changes.
RUN python -m venv /opt/minisgl \
    && pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c /tmp/constraints.txt torch
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt /wheels/*.whl

FROM python:${PYTHON}-slim AS cpu
RUN useradd --create-home --uid 10001 minisgl
COPY --from=cpu-packages /opt/minisgl /opt/minisgl
ENV PATH=/opt/minisgl/bin:$PATH
USER 10001
WORKDIR /home/minisgl
EXPOSE 1919
HEALTHCHECK --start-period=5m --start-interval=2s --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:1919/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "minisgl", "server.host=0.0.0.0"]

# ---- cuda --------------------------------------------------------------------------------------------

# The devel image, because Triton and FlashInfer compile kernels at run time: they need a C++ compiler and nvcc.
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS cuda
ENV PATH=/opt/minisgl/bin:$PATH
# Triton's launchers include Python.h, which is in python3-dev.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 minisgl \
    && python3 -m venv /opt/minisgl
COPY constraints.txt /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt torch
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/*.whl)[gpu]"
USER 10001
WORKDIR /home/minisgl
EXPOSE 1919
HEALTHCHECK --start-period=10m --start-interval=2s --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:1919/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "minisgl", "server.host=0.0.0.0"]
