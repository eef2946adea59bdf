# A node: rootless, and with nothing that it does not need (no plots, no hub, no images).
#   docker build -f packaging/containers/node.Dockerfile -t kinfed-node .
#   docker run --read-only --tmpfs /tmp --cap-drop ALL -v ./kit-hospital-a:/node -v ./data:/data:ro kinfed-node
FROM python:3.13-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY packaging/requirements-node.txt ./
RUN python -m venv /opt/kinfed \
    && /opt/kinfed/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu -r requirements-node.txt
COPY pyproject.toml README.md LICENSE ./
COPY kinfed ./kinfed
RUN /opt/kinfed/bin/pip install --no-deps .

FROM python:3.13-slim
COPY --from=build /opt/kinfed /opt/kinfed
RUN useradd --uid 10001 --no-create-home --home-dir /node --shell /usr/sbin/nologin kinfed
ENV PATH=/opt/kinfed/bin:$PATH PYTHONUNBUFFERED=1 HOME=/node KINFED_HEALTH=127.0.0.1:9464 KINFED_LOG_FORMAT=json
USER 10001
WORKDIR /node
# The start kit with the key: node.toml, ca.crt, key, vault. All that is written is written here.
VOLUME /node
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/health', timeout=4)"]
ENTRYPOINT ["kinfed", "deploy", "node"]
CMD ["/node/node.toml"]
