# A hub: docker build -t headgate . (see docs/install.md)

FROM python:3.13-slim AS build
# hadolint ignore=DL3008  # the image is rebuilt with the compiler of its day
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
COPY src src
ENV PIP_CONSTRAINT=/source/constraints.txt PIP_BUILD_CONSTRAINT=/source/constraints.txt
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN pip wheel --no-deps --wheel-dir /wheels .
RUN python -m venv --without-pip /opt/headgate \
    && pip --python /opt/headgate/bin/python install "$(echo /wheels/*.whl)[server]" \
    && /opt/headgate/bin/python -c "from headgate.stores.memory_tables import compiled; exit(not compiled())"

FROM python:3.13-slim
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin headgate \
    && install --directory --owner headgate --group headgate --mode 0700 /data
COPY --from=build /opt/headgate /opt/headgate
ENV PATH=/opt/headgate/bin:$PATH PYTHONUNBUFFERED=1
ENV HEADGATE_HOST=0.0.0.0 HEADGATE_DATA=/data/hub
USER 10001:10001
VOLUME /data
EXPOSE 8080
# Without TLS, and on the port of HEADGATE_PORT: a hub that is set otherwise needs another check.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["python", "-c", "import http.client, os; \
hub = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('HEADGATE_PORT', 8080)), timeout=4); \
hub.request('GET', '/live'); exit(hub.getresponse().status != 200)"]
# The hub is process 1 and gets the signals itself.
CMD ["headgate", "serve"]
