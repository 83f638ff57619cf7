"""The wheel and the sdist: what they hold, and that they run where nothing else is installed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

from tests.cli.processes import line_with

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYTHON", "TENSORHUB_", "VIRTUAL_ENV", "PYENV_VERSION"))
}
LIMIT_S = 300.0


def run(*command: object, cwd: Path) -> str:
    """What the finished command printed; AssertionError if it failed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=CLEAN,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}"
    return done.stdout


@dataclass(frozen=True)
class Built:
    sdist: Path
    source: Path  # the unpacked sdist
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An sdist of this tree, and the wheel that is built from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out, cwd=ROOT)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    source = out / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=source)
    (wheel,) = out.glob("*.whl")
    return Built(sdist, source, wheel)


@pytest.mark.heavy
def test_the_sdist_is_complete_and_its_wheel_runs(built: Built, tmp_path: Path) -> None:
    for name in ("src", "tests", "benches", "examples", "deploy", "docs"):
        here = {
            path.relative_to(ROOT)
            for path in (ROOT / name).rglob("*")
            if path.suffix
            in (".py", ".md", ".cu", ".js", ".css", ".json", ".yaml", ".tpl", ".service")
        }
        there = {path.relative_to(built.source) for path in (built.source / name).rglob("*")}
        assert here <= there, name
    wheel = zipfile.ZipFile(built.wheel)
    code = {path.relative_to(ROOT / "src").as_posix() for path in ROOT.glob("src/**/*.py")}
    assert code <= set(wheel.namelist())
    (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    described = Parser().parsestr(wheel.read(metadata).decode())
    assert described["Name"] == PROJECT["name"]
    links = re.findall(r"\]\((?!https://|#)[^)]*\)", str(described.get_payload()))
    assert links == []  # on PyPI there is no page beside this one
    wheel.extractall(tmp_path)
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from tensorhub.cli import main; main()"
    )
    assert "tensorhub-tcp" in run(
        sys.executable, "-c", program, tmp_path, "bench", "--list", cwd=tmp_path
    )


# --------------------------------------------------------------------------------------------------
# in empty environments


def interpreter(version: str) -> str:
    """A Python of that version which can make environments; the test is skipped without one."""
    found = [shutil.which(f"python{version}")]
    found += [str(path) for path in Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for path in filter(None, found):
        said = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([path, "-c", said], capture_output=True, text=True, env=CLEAN)
        if done.stdout.strip() == version:
            return path
    pytest.skip(f"no Python {version} with ensurepip")


class Environment:
    """A new environment, with what the package index gives; the test is skipped without that."""

    def __init__(self, python: str, place: Path) -> None:
        self.place = place
        self.bin = place / "env" / "bin"
        run(python, "-m", "venv", place / "env", cwd=place)

    def fetch(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> None:
        (self.place / "constraints").write_text("\n".join(constraints))
        pip = [self.bin / "pip", "install", "-q", "-c", self.place / "constraints"]
        try:
            run(*pip, *requirements, cwd=self.place)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"pip cannot get {', '.join(requirements)} here: {str(error)[-300:]}")

    def tensorhub(self, *arguments: object) -> str:
        return run(self.bin / "tensorhub", *arguments, cwd=self.place)


def lowest(requirements: Sequence[str]) -> list[str]:
    """The oldest release that each requirement admits."""
    found = [re.fullmatch(r"([\w-]+)>=([\w.]+)", text) for text in requirements]
    assert all(found), requirements
    return [f"{match[1]}=={match[2]}" for match in found if match]


EXTRAS = PROJECT["optional-dependencies"]
LIGHT = [
    text for name in ("http", "top", "otel", "archive", "delta", "ha") for text in EXTRAS[name]
]
TORCH = re.findall(r"torch==[\d.]+", (ROOT / "Makefile").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("kind", ["alone", "extras", "lowest", "sdist", "torch"])
def test_it_runs_in_an_empty_environment(
    built: Built, version: str, kind: str, tmp_path: Path
) -> None:
    if kind == "lowest" and version != "3.11":
        pytest.skip("the oldest releases of some dependencies have no wheels for newer Pythons")
    there = Environment(interpreter(version), tmp_path)
    needed = PROJECT["dependencies"] + (LIGHT if kind in ("extras", "lowest") else [])
    there.fetch(needed, lowest(needed) if kind == "lowest" else ())
    if kind == "torch":  # other builds bring gigabytes of CUDA
        there.fetch([*EXTRAS["torch"], f"{TORCH[0]}+cpu"])
    if kind == "sdist":
        there.fetch(["hatchling", "hatch-fancy-pypi-readme"])
        run(
            there.bin / "pip",
            "install",
            "-q",
            "--no-index",
            "--no-build-isolation",
            built.sdist,
            cwd=tmp_path,
        )
    else:
        run(there.bin / "pip", "install", "-q", "--no-index", built.wheel, cwd=tmp_path)
    run(there.bin / "pip", "check", cwd=tmp_path)
    run(there.bin / "python", "-W", "error", "-c", "import tensorhub", cwd=tmp_path)
    assert "publish" in there.tensorhub("--help")
    weights_travel(there, ["--http", "127.0.0.1:0"] if kind in ("extras", "lowest") else [])
    if kind == "torch":
        plan = "--mib 4 --rounds 1 --copies 1 --receivers 1 --only tensorhub-tcp --json".split()
        (row,) = json.loads(there.tensorhub("bench", *plan))["rows"]
        assert row["reason"] is None


def weights_travel(there: Environment, options: Sequence[str]) -> None:
    """A file goes from a publisher to a reader, and all processes end as they should."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}})
    mine = there.place / "mine.safetensors"
    mine.write_bytes(struct.pack("<Q", len(header)) + header.encode() + os.urandom(4096))
    program = there.bin / "tensorhub"
    serve = [program, "serve", "--port", "0", "--state-dir", there.place / "state", *options]
    with started(serve) as coordinator:
        where = ["--address", line_with("tcp://", coordinator.stdout).split()[-1]]
        publish = [program, "publish", mine, "--model", "mine", "--json", *where]
        with started(publish) as publisher:
            line_with('"version"', publisher.stdout)
            there.tensorhub("fetch", "mine", "--out", "copy.safetensors", *where)
            assert "mine" in there.tensorhub("status", *where)
            assert (there.place / "copy.safetensors").read_bytes() == mine.read_bytes()
            assert stopped(publisher) == 0
        assert stopped(coordinator) == 0


@contextlib.contextmanager
def started(command: Sequence[object]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, text=True, env=CLEAN
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def stopped(process: subprocess.Popen[str]) -> int:
    """The exit code after SIGTERM."""
    process.terminate()
    return process.wait(LIMIT_S)
