# jaxllama's server on an NVIDIA GPU.  Not built here: hadolint has read this file.
#
#   docker build -f docker/cuda.Dockerfile -t jaxllama-cuda .
#   docker run --rm --gpus all -p 127.0.0.1:8000:8000 -v jaxllama-cache:/cache \
#     -e JAXLLAMA_API_KEY=KEY jaxllama-cuda
#
# CUDA's libraries come with the extra cuda13; the host needs its driver and the container toolkit.
# Without a key everybody who reaches the port can use the model: see SECURITY.md.
FROM python:3.13-slim

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY jaxllama jaxllama
COPY pallas_kernels pallas_kernels
# pyproject.toml has the versions.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[cuda13,serve,grammar]'

RUN useradd --create-home --uid 1000 jaxllama && install -d -o jaxllama /cache
USER 1000
WORKDIR /home/jaxllama
ENV JAXLLAMA_CACHE=/cache/jaxllama HF_HOME=/cache/huggingface \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
ENTRYPOINT ["jaxllama"]
CMD ["serve", "--host", "0.0.0.0"]
