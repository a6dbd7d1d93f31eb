# kvbus in a container: no compiler, no cache, a fixed unprivileged user, happy with a read-only root.
#
#   docker build -t kvbus .
#   docker run --rm --network host --read-only --cap-drop ALL -v $PWD/kvbus.yaml:/etc/kvbus/kvbus.yaml:ro -v kvbus:/var/lib/kvbus kvbus
ARG PYTHON_IMAGE=python:3.13.15-slim-trixie@sha256:8d9d0b8bcf6506481eae4907c18f5e3e7902e629f5f6d684f9e7c32e85e3ddf0

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY requirements-runtime.lock requirements-build.lock ./
# Wheels only and every one by its hash. The runtime environment gets no pip of its own.
RUN python3 -m venv /opt/build \
 && /opt/build/bin/python -m pip install --no-cache-dir --only-binary :all: --require-hashes -r requirements-build.lock \
 && python3 -m venv --without-pip /opt/kvbus \
 && /opt/build/bin/python -m pip --python /opt/kvbus/bin/python install --no-cache-dir --no-compile --only-binary :all: --require-hashes -r requirements-runtime.lock
COPY pyproject.toml README.md LICENSE ./
COPY kvbus ./kvbus
# byte code by hash: it knows no date, so a commit gives the same image each time, and dates of files may change
RUN PYTHONHASHSEED=0 /opt/build/bin/python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /tmp/wheel . \
 && /opt/build/bin/python -m pip --python /opt/kvbus/bin/python install --no-cache-dir --no-compile --no-deps --no-index /tmp/wheel/*.whl \
 && PYTHONHASHSEED=0 /opt/kvbus/bin/python -m compileall -qf --invalidation-mode unchecked-hash /opt/kvbus/lib \
 && mkdir -p /rootfs/etc/kvbus /rootfs/var/lib/kvbus \
 && chown 65532:65532 /rootfs/var/lib/kvbus

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvbus" \
      org.opencontainers.image.description="Event bus between LLM engines' KV-cache events and KV-aware routers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/kvbus /opt/kvbus
COPY --from=build /rootfs/ /
# state_dir: auto keeps the state there if it can be written: a volume outlives the container, /dev/shm does not
ENV PATH=/opt/kvbus/bin:$PATH \
    STATE_DIRECTORY=/var/lib/kvbus \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /var/lib/kvbus
# events, replay, metrics and status
EXPOSE 5657 5658 9477
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvbus"]
CMD ["run", "/etc/kvbus/kvbus.yaml"]
