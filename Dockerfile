# The pipeline: flows, worker and the `roster` command.
FROM python:3.11-slim
WORKDIR /opt/adapter-roster
RUN pip install --no-cache-dir "uv>=0.9"
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY flows flows
COPY tasks tasks
COPY storage storage
COPY roster roster
RUN uv pip install --system --torch-backend cpu --constraint constraints.txt .
CMD ["roster", "--help"]
