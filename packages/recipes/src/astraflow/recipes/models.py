"""From a model reference to a local Hugging Face directory: the one form that engines and trainers take.

A reference is `package:NAME` (a model carried by an installed package), a directory, or a hub id. Whatever it was,
the result has been through the same checks: configuration, safetensors weights, tokenizer and chat template are there.
Invariant: a directory in the cache is complete or absent. It is made under a temporary name, synced and renamed, so
two processes that ask at once both get it, and one that dies in the middle leaves nothing in the way.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs

from . import smollm2
from .config import ConfigError

PACKAGE_PREFIX = "package:"
CACHE_VARIABLE = "ASTRAFLOW_CACHE"
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


class ModelError(ConfigError):
    """A model reference cannot be used; the message says what is missing and what to do."""


def resolve_model(ref: str, cache: Path | None = None) -> Path:
    """The local directory of a model: bf16 safetensors (or what the directory holds), tokenizer, chat template.

    `cache` (default: `cache_directory()`) is where packaged models are converted to, once.

    Raises:
        ModelError: unknown name, no such directory or repository, or a directory without what a policy needs.
    """
    if ref.startswith(PACKAGE_PREFIX):
        directory = _packaged(ref.removeprefix(PACKAGE_PREFIX), cache or cache_directory())
    elif Path(ref).expanduser().is_dir():
        directory = Path(ref).expanduser().resolve()
    elif _looks_like_path(ref):
        raise ModelError(f"model {ref!r}: no such directory")
    else:
        directory = _from_hub(ref)
    check_model(directory, ref)
    return directory


def cache_directory() -> Path:
    """Where converted models live: $ASTRAFLOW_CACHE, or the user's cache directory."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("astraflow"))


def check_model(directory: Path, ref: str) -> None:
    """Assert that a directory holds all that a policy needs.

    Raises:
        ModelError: naming everything that is missing.
    """
    missing = []
    if not (directory / "config.json").is_file():
        missing.append("config.json")
    missing += _missing_weights(directory)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("a tokenizer (tokenizer.json)")
    if not _has_chat_template(directory):
        missing.append("a chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")
    if missing:
        raise ModelError(
            f"model {ref!r} in {directory} lacks {'; '.join(missing)}. "
            "A policy is a chat model with safetensors weights: use an instruct model, or save one there with "
            "model.save_pretrained and tokenizer.save_pretrained."
        )


def _missing_weights(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [] if (directory / "model.safetensors").is_file() else ["model.safetensors"]
    shards = set(json.loads(index.read_text())["weight_map"].values())
    return sorted(name for name in shards if not (directory / name).is_file())


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    config = directory / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("chat_template"))


def _looks_like_path(ref: str) -> bool:
    return ref.startswith((".", "/", "~")) or ref.count("/") > 1 or (os.sep != "/" and os.sep in ref)


def _from_hub(ref: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    known = ", ".join(PACKAGE_PREFIX + name for name in PACKAGED)
    try:
        return Path(snapshot_download(ref, allow_patterns=list(HUB_FILES)))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {ref!r} is neither a directory nor in the local hub cache, and the hub cannot be reached. "
            f"Models that need no hub: {known}"
        ) from error
    except (HFValidationError, HfHubHTTPError) as error:
        raise ModelError(
            f"model {ref!r}: the hub has none to give ({error}). Models that need no hub: {known}"
        ) from error


def _packaged(name: str, cache: Path) -> Path:
    if name not in PACKAGED:
        raise ModelError(f"no packaged model {name!r}; there are {', '.join(sorted(PACKAGED))}")
    return PACKAGED[name](cache)


def _smollm2(cache: Path) -> Path:
    try:
        source = smollm2.find_gguf()
    except FileNotFoundError as error:
        raise ModelError(f"model 'package:smollm2': {error}") from error
    return build_once(cache / "models" / f"smollm2-{smollm2.REVISION}", lambda target: smollm2.convert(source, target))


def _tiny(cache: Path) -> Path:
    return Path(str(importlib.resources.files(__package__).joinpath("tiny", "model")))


PACKAGED: Mapping[str, Callable[[Path], Path]] = {"smollm2": _smollm2, "tiny": _tiny}


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, made by `build(temporary directory)` if it does not exist yet; atomic and safe to race."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(temporary)
        _sync(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(target)
        except OSError:
            # A directory cannot be renamed onto a full one: another process was faster, and its result is the same.
            if not target.is_dir():
                raise
        _sync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
