# vLLM for CPUs with SegueConnector. VLLM_IMAGE is an image of vLLM 0.32.0 for CPUs. In a clone:
# docker build -f deploy/vllm.Dockerfile --build-arg VLLM_IMAGE=IMAGE -t segue-vllm:0.2.0 .
ARG VLLM_IMAGE
FROM ${VLLM_IMAGE}
USER root
WORKDIR /src
COPY pyproject.toml MANIFEST.in LICENSE CHANGELOG.md CONTRIBUTING.md ./
COPY docs docs
COPY examples examples
COPY src src
RUN python3 -m pip install --no-cache-dir .
WORKDIR /tmp
