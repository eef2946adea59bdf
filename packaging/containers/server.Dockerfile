# The server: rootless. Flower's control port stays inside; `docker exec` runs flwr.
#   docker build -f packaging/containers/server.Dockerfile -t kinfed-server .
#   docker run -p 8000:8000 -v ./certs:/certs:ro -v kinfed-runs:/runs kinfed-server
FROM python:3.13-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY kinfed ./kinfed
RUN python -m venv /opt/kinfed \
    && /opt/kinfed/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu '.[node]'

FROM python:3.13-slim
COPY --from=build /opt/kinfed /opt/kinfed
RUN useradd --uid 10001 --no-create-home --home-dir /runs --shell /usr/sbin/nologin kinfed \
    && install -d -o 10001 -m 700 /runs
ENV PATH=/opt/kinfed/bin:$PATH PYTHONUNBUFFERED=1 HOME=/runs KINFED_HEALTH=127.0.0.1:9464 KINFED_LOG_FORMAT=json
USER 10001
WORKDIR /runs
VOLUME /runs
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/health', timeout=4)"]
ENTRYPOINT ["kinfed", "deploy", "server"]
CMD ["/certs", "--host", "0.0.0.0", "--port", "8000", "--folder", "/runs/superlink"]
