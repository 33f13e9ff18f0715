# The engine for CPUs: stoker[engine,demo], without kopf. Build from the repository's root:
#   docker build -f images/engine/cpu.Dockerfile -t stoker/engine-cpu:dev .
# BASE: Debian or the like, with Python 3.11 or later, its venv module and CA certificates.
# TORCH_INDEX_URL: an index of torch wheels for CPUs; the usual index has those with CUDA, for 2 GB more.
#
# Three layers, from the one that changes least: torch, the other dependencies, the application.
ARG BASE=python:3.12-slim

# pip stays in an environment of its own, out of the image. Where it finds packages is its usual configuration.
FROM $BASE AS pip
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ENV PIP_INDEX_URL=$PIP_INDEX_URL PIP_NO_INDEX=$PIP_NO_INDEX PIP_FIND_LINKS=$PIP_FIND_LINKS \
    PIP_TRUSTED_HOST=$PIP_TRUSTED_HOST PIP_NO_CACHE_DIR=1 PIP_PYTHON=/opt/stoker/bin/python
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/stoker
COPY constraints.txt ./

# A stage of its own: what depends on this list is built again only when the list changes.
FROM pip AS requirements
COPY pyproject.toml images/requirements.py ./
RUN python3 requirements.py pyproject.toml engine demo > requirements.txt

FROM pip AS torch
ARG TORCH_INDEX_URL
COPY images/engine/prune_torch.py images/
RUN PIP_INDEX_URL=${TORCH_INDEX_URL:-$PIP_INDEX_URL} /opt/pip/bin/pip install torch numpy -c constraints.txt \
 && /opt/stoker/bin/python images/prune_torch.py

# torch is found in /opt/stoker, so pip does not install it again under the prefix.
FROM torch AS dependencies
COPY --from=requirements requirements.txt ./
RUN /opt/pip/bin/pip install -r requirements.txt -c constraints.txt --prefix /opt/dependencies

# The CPU kernels for every kind of processor, unless they came with the sources; only here is a compiler needed.
FROM $BASE AS kernels
COPY engine engine
ENV PYTHONPATH=engine PYTHONDONTWRITEBYTECODE=1
RUN python3 -m stoker_engine.kernels.native.build \
 || { apt-get update && apt-get install -y --no-install-recommends g++ && python3 -m stoker_engine.kernels.native.build; }

FROM pip AS application
COPY pyproject.toml README.md LICENSE ./
COPY cli cli
COPY --from=kernels engine engine
COPY operator operator
RUN /opt/pip/bin/pip install --no-deps --prefix /opt/application .

FROM $BASE
LABEL org.opencontainers.image.title="stoker engine (CPU)" \
      org.opencontainers.image.description="Inference engine for large language models, with an OpenAI-compatible API" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=torch /opt/stoker /opt/stoker
COPY --from=dependencies /opt/dependencies /opt/stoker
COPY --from=application /opt/application /opt/stoker
# The root file system may be read-only: what is written (models, caches) goes to /cache.
RUN mkdir /cache && chown 65532:65532 /cache
VOLUME /cache
# torch asks for the user's name, and 65532 has none.
ENV PATH=/opt/stoker/bin:$PATH HOME=/cache TMPDIR=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface \
    USER=stoker PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["stoker"]
CMD ["serve"]
