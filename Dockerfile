# fastdiff on a CUDA runtime, for docker, Kubernetes and (converted) Slurm:
#   docker build -t fastdiff .                          # CUDA 13, driver 580 or newer
#   docker build -t fastdiff --build-arg CUDA=12 .      # CUDA 12, driver 525 or newer
#   docker run --gpus all --ipc host -v "$PWD":/work fastdiff fastdiff train --preset digits
ARG CUDA=13

FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04 AS cuda13
ENV CONSTRAINTS=constraints.txt
FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04 AS cuda12
ENV CONSTRAINTS=constraints-cu12.txt

# Triton compiles its launchers, Inductor its host code and DeepSpeed its operators when they run: with g++, ninja (of the
# wheels) and the headers of Python.
# hadolint ignore=DL3006
FROM cuda${CUDA} AS base
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        fonts-dejavu-core fonts-unifont g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/fastdiff
ENV PATH=/opt/fastdiff/bin:$PATH

FROM base AS wheels
COPY . /source
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM base
ARG CUDA
COPY constraints*.txt /tmp/constraints/
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir --constraint "/tmp/constraints/$CONSTRAINTS" \
        "$(echo /wheels/*.whl)[cuda${CUDA},all]" \
    && rm -r /tmp/constraints
# Images of Ubuntu have a user 1000; pods and mounted folders use this number.
RUN getent passwd 1000 || useradd --create-home --uid 1000 fastdiff \
    && install --directory --owner 1000 --group 1000 /work
USER 1000:1000
WORKDIR /work
CMD ["fastdiff", "doctor"]
