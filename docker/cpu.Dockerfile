# jaxllama's server on a CPU.  Not built here: hadolint has read this file, and its RUN lines were
# tried as plain commands in a fresh virtual environment (Python 3.13, 2026-11-25).
#
#   docker build -f docker/cpu.Dockerfile -t jaxllama .
#   docker run --rm -p 127.0.0.1:8000:8000 -v jaxllama-cache:/cache -e JAXLLAMA_API_KEY=KEY jaxllama
#
# Without a key everybody who reaches the port can use the model: see SECURITY.md.
FROM python:3.13-slim

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY jaxllama jaxllama
COPY pallas_kernels pallas_kernels
# pyproject.toml has the versions.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[serve,grammar]'

RUN useradd --create-home --uid 1000 jaxllama && install -d -o jaxllama /cache
USER 1000
WORKDIR /home/jaxllama
ENV JAXLLAMA_CACHE=/cache/jaxllama HF_HOME=/cache/huggingface
EXPOSE 8000
ENTRYPOINT ["jaxllama"]
CMD ["serve", "--host", "0.0.0.0"]
