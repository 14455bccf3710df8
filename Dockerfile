# syntax=docker/dockerfile:1
# One file, one target per service:  docker build --target gateway|scheduler|gpu_worker|tools .
# PYTHON_IMAGE: any image with Python 3.11 or newer and pip. TORCH: the torch to install in gpu_worker and tools, a CUDA build
# unless PIP_EXTRA_INDEX_URL names PyTorch's index of CPU wheels.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS wheel
# The compiler of the worker's CPU kernels; no final image has it. Skipped where the image brings one.
RUN command -v g++ > /dev/null \
    || (apt-get update -qq && apt-get install -qq --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*)
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md alembic.ini ./
COPY service_kit service_kit
COPY state_store state_store
COPY migrations migrations
COPY gateway gateway
COPY scheduler scheduler
COPY gpu_worker gpu_worker
COPY sluice sluice
COPY protos/gen protos/gen
RUN pip wheel --quiet --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN useradd --create-home --uid 10001 sluice \
    && mkdir -p /models /home/sluice/.sluice/models && chown -R sluice:sluice /models /home/sluice/.sluice
WORKDIR /home/sluice

FROM base AS gateway
COPY --from=wheel /wheels /wheels
RUN pip install --quiet "$(ls /wheels/*.whl)[gateway,otlp]"
USER sluice
ENV SLUICE_GATEWAY_LISTEN=0.0.0.0:50051 SLUICE_MODELS_DIR=/models
EXPOSE 50051
HEALTHCHECK --start-period=60s CMD ["python", "-m", "service_kit.health_probe", "127.0.0.1:50051"]
CMD ["python", "-m", "gateway"]

FROM base AS scheduler
COPY --from=wheel /wheels /wheels
RUN pip install --quiet "$(ls /wheels/*.whl)[scheduler,otlp]"
USER sluice
ENV SLUICE_SCHEDULER_LISTEN=0.0.0.0:7201
EXPOSE 7201
HEALTHCHECK --start-period=60s CMD ["python", "-m", "service_kit.health_probe", "--internal", "127.0.0.1:7201"]
CMD ["python", "-m", "scheduler"]

FROM base AS gpu_worker
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL
# Before the wheel, so that a change of the code does not install torch again.
RUN pip install --quiet "${TORCH}"
COPY --from=wheel /wheels /wheels
RUN pip install --quiet "$(ls /wheels/*.whl)[gpu-worker,otlp]"
USER sluice
ENV SLUICE_WORKER_LISTEN=0.0.0.0:7301
EXPOSE 7301
HEALTHCHECK --start-period=120s CMD ["python", "-m", "service_kit.health_probe", "--internal", "127.0.0.1:7301"]
CMD ["python", "-m", "gpu_worker"]

# One-shot work: `sluice models pull`, `sluice keys create`, `sluice generate`.
FROM gpu_worker AS tools
USER root
RUN pip install --quiet "$(ls /wheels/*.whl)[stores,cli]"
USER sluice
ENTRYPOINT ["sluice"]
CMD ["--help"]
