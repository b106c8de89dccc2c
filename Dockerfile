# The pipeline and Prefect: flows, worker, `roster`, and every role of the Prefect server.
FROM python:3.11.14-slim-bookworm
ENV PYTHONUNBUFFERED=1
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /opt/adapter-roster
# Dependencies first: they stay as they are when only the code changes.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN uv pip install --system --no-cache --compile-bytecode --torch-backend cpu --constraint constraints.txt \
    --extra server --requirement pyproject.toml
COPY flows flows
COPY tasks tasks
COPY storage storage
COPY roster roster
# The working directory holds no code: what runs is what was installed, wherever it is started.
RUN uv pip install --system --no-cache --compile-bytecode --no-deps . && rm -r /opt/adapter-roster \
    && useradd --uid 10001 --create-home roster \
    && install --directory --owner roster --group roster /var/lib/roster /var/lib/prefect
USER roster
WORKDIR /var/lib/roster
CMD ["roster", "--help"]
