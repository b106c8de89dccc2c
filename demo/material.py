"""Everything the demo uploads, made once and kept: a trained base, its authors' adapters, held-out texts.

Training runs in child processes, one thread each, so that the caller stays light and two authors are trained
side by side. What is made depends only on the sources of this folder and the versions of the libraries; their
digest names the cached folder, which appears whole or not at all.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue

from demo.authors import AUTHORS, BASE_NAME, TRAINING_FILE, AuthorPlan, Places
from demo.texts import write_author, write_units

TRAINING_UNITS = 500
HELDOUT_UNITS = 64
WORKERS = 2

_SOURCES = ("authors.py", "base.py", "encode.py", "material.py", "texts.py", "train.py")
_LIBRARIES = ("peft", "tokenizers", "torch", "transformers")
_TERMINATE_SECONDS = 10
_LAST_LINES = 15


class MaterialError(Exception):
    """A training process ended badly.

    Raised with what the process had to do, its exit code and the last lines it wrote.
    """

    def __init__(self, task: str, exit_code: int, output: str) -> None:
        super().__init__(task, exit_code, output)
        self.task = task
        self.exit_code = exit_code
        self.output = output

    def __str__(self) -> str:
        return (
            f"demo material: {self.task} should end with exit code 0 but ended with {self.exit_code}; "
            f"its last words: {self.output or '(none)'}. Is the environment complete? Run setup again."
        )


@dataclass(frozen=True, slots=True)
class DemoAuthor:
    """One author's upload: `adapter_dir` is what the trainer left, `heldout_file` JSON lines {"id", "text"}.

    `training` is the training.json inside `adapter_dir`, where there is one. `encoding` is for people.
    """

    name: str
    adapter_dir: Path
    heldout_file: Path
    training: Path | None
    encoding: str
    lies: bool


@dataclass(frozen=True, slots=True)
class Material:
    """The base as a model folder (config.json, weights, tokenizer), the name it goes by, and its authors."""

    base_dir: Path
    base_name: str
    authors: tuple[DemoAuthor, ...]


def build_material(cache_dir: Path, progress: Callable[[str], None]) -> Material:
    """The demo's material under `cache_dir`, made now if it is not there.

    `progress` gets one line at a time, always from the calling thread. Raises MaterialError.
    """
    final = cache_dir / f"material-{_digest()}"
    if final.is_dir():
        progress(f"material: kept from before in {final}")
        return _material(Places(final))
    cache_dir.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=cache_dir))
    try:
        _build(Places(building), progress)
        building.rename(final)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return _material(Places(final))


def _build(places: Places, progress: Callable[[str], None]) -> None:
    sizes = {}
    for author in AUTHORS:
        texts = write_author(author.name, training=TRAINING_UNITS, heldout=HELDOUT_UNITS)
        places.texts(author.name).parent.mkdir(parents=True)
        write_units(places.texts(author.name), texts.training)
        write_units(places.heldout(author.name), texts.heldout)
        sizes[author.name] = sum(len(unit.text) for unit in texts.training)
    run_modules([("demo.base", str(places.base))], progress)
    run_modules([("demo.train", str(places.root), *share) for share in _share(sizes, WORKERS)], progress)


def _share(sizes: dict[str, int], workers: int) -> list[list[str]]:
    """Authors spread over workers, the longest first, each to the worker with the least to do."""
    shares: list[list[str]] = [[] for _ in range(workers)]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        min(shares, key=lambda share: sum(sizes[each] for each in share)).append(name)
    return shares


def run_modules(commands: Sequence[Sequence[str]], progress: Callable[[str], None]) -> None:
    """Run modules with their arguments side by side, their lines to `progress`; none is left running.

    Raises MaterialError for the first that ends badly.
    """
    lines: SimpleQueue[str | None] = SimpleQueue()
    children: list[_Child] = []
    try:
        for command in commands:
            children.append(_Child(command, lines))
        for _ in children:
            while (line := lines.get()) is not None:
                progress(line)
        for child in children:
            child.finish()
    finally:
        for child in children:
            child.end()


class _Child:
    """One module run by this interpreter: its lines go into a queue, then None; its errors go to a file."""

    def __init__(self, command: Sequence[str], lines: SimpleQueue[str | None]) -> None:
        self._command = command
        # Read only where the process fails; closed by end().
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115
            mode="w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        threading.Thread(target=self._forward, args=(lines,), daemon=True).start()

    def _forward(self, lines: SimpleQueue[str | None]) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                lines.put(line.rstrip("\n"))
        lines.put(None)

    def finish(self) -> None:
        """Wait for the end. Raises MaterialError where it was not a good one."""
        if self._process.wait() != 0:
            self._errors.seek(0)
            last = self._errors.read().splitlines()[-_LAST_LINES:]
            raise MaterialError(" ".join(self._command), self._process.returncode, "\n".join(last))

    def end(self) -> None:
        """Stop the process if it still runs, and let go of what it held."""
        self._process.terminate()
        try:
            self._process.wait(_TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def _material(places: Places) -> Material:
    return Material(
        base_dir=places.base,
        base_name=BASE_NAME,
        authors=tuple(_author(places, author) for author in AUTHORS),
    )


def _author(places: Places, author: AuthorPlan) -> DemoAuthor:
    training = places.adapter(author.name) / TRAINING_FILE
    return DemoAuthor(
        name=author.name,
        adapter_dir=places.adapter(author.name),
        heldout_file=places.heldout(author.name),
        training=training if training.is_file() else None,
        encoding=author.recipe.label,
        lies=author.recipe.lies,
    )


def _digest() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    for library in _LIBRARIES:
        digest.update(f"{library} {version(library)}\n".encode())
    return digest.hexdigest()[:16]


def main(arguments: Sequence[str]) -> int:
    """Build the material under the folder named on the command line and list it."""
    if len(arguments) != 1:
        print("usage: python -m demo.material DIRECTORY", file=sys.stderr)
        return 2
    material = build_material(Path(arguments[0]), lambda line: print(line, flush=True))
    print(f"base {material.base_name}: {material.base_dir}")
    for author in material.authors:
        print(f"{author.name}: {author.encoding}{' (lies)' if author.lies else ''}: {author.adapter_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
