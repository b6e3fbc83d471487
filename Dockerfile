# The image knows nothing of keys or data: the volume /data holds what Heed stores, settings are HEED_* variables.
# /keys is for a volume that the service shares with Prometheus (HEED_METRICS_KEY_FILE).

FROM python:3.11-slim-bookworm AS packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/heed
WORKDIR /build
COPY requirements/runtime.txt requirements/torch.txt requirements/torch_index.py requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/heed/bin/python install --require-hashes -r requirements/runtime.txt
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/heed/bin/python install --no-compile \
      $(python requirements/torch_index.py "$TORCH_INDEX") -r requirements/torch.txt
# What running needs none of: test programs, headers to compile against, the suites of the mathematics
# packages. torch's bytecode is written by importing it, optimisers included (torch._dynamo): what no
# import reaches stays source.
RUN <<'EOF'
set -eu
cd /opt/heed/lib/python3.11/site-packages
find torch/bin -type f ! -name torch_shm_manager -delete
rm -rf torch/test torch/include torch/share torch/lib/*_test.so
find . -name '*.a' -delete
find numpy sympy networkx -type d -name tests -prune -exec rm -rf {} +
/opt/heed/bin/python -c 'import torch._dynamo, torch.distributed, faiss, wordllama'
EOF

FROM packages AS wheel
COPY pyproject.toml LICENSE README.md ./
COPY models models
COPY service service
RUN pip --python /opt/heed/bin/python wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheel .

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="Heed" org.opencontainers.image.licenses="Apache-2.0 AND MIT"
RUN groupadd --gid 10001 heed \
    && useradd --uid 10001 --gid heed --no-create-home --home-dir /tmp --shell /usr/sbin/nologin heed \
    && install -d -o heed -g heed -m 0750 /data /keys
COPY --from=packages /opt/heed /opt/heed
RUN --mount=from=wheel,source=/wheel,target=/wheel \
    pip --disable-pip-version-check --python /opt/heed/bin/python install \
      --no-cache-dir --no-deps --no-index --root-user-action=ignore /wheel/*.whl
# The root may be read-only, and nothing is downloaded at start-up.
ENV PATH=/opt/heed/bin:$PATH HOME=/tmp HEED_DATA=/data HF_HUB_OFFLINE=1 \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=3s --retries=3 --start-period=120s --start-interval=1s \
    CMD ["python", "-I", "-m", "service.runtime.health_check"]
# Every address of the container, and so with API keys: the first one is created in /data/admin.key.
CMD ["heed", "serve", "--host", "0.0.0.0", "--first-key"]
