"""The `weightsync` command: `serve`, `pull`, `mirror`, `inspect`, `verify`, `bench`.

Invariant: stdout carries results (JSON with --json), stderr everything else; an error that a person can mend is one
line that says what happened, where and what to do.
"""

from __future__ import annotations

import difflib
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import anyio
import msgspec

try:
    import rich  # noqa: F401
    import tyro
except ModuleNotFoundError as error:
    sys.exit(f"weightsync: the command needs {error.name}: pip install 'astraflow-weightsync[cli]'")

from .interface import TransferMode, WeightSyncError

DONE, DAMAGED, WRONG_USAGE, UNREACHABLE = 0, 1, 2, 3

USAGE = """usage: weightsync COMMAND [OPTIONS]

  weightsync serve DIR             give out a store's directory over HTTP(S)
  weightsync pull SOURCE DIR       bring DIR/current/model.safetensors to the newest version
  weightsync mirror SOURCE DIR     follow a store into a directory: a relay for one region
  weightsync inspect SOURCE        versions, sizes, density, codecs, anchors
  weightsync verify SOURCE         compute every digest anew
  weightsync bench                 measure codecs, digests and applying on this machine

SOURCE is a directory, file:///dir, http(s)://HOST:PORT, s3://BUCKET/PREFIX, gs://… or az://…
weightsync COMMAND --help shows a command's options.

Exit codes: 0 done; 1 damage, or a version that was refused; 2 wrong usage; 3 a store or file that cannot be reached,
or holds nothing; 130 and 143 interrupted. serve, mirror and pull --follow run until SIGINT or SIGTERM, and end with 0.
"""


class UsageError(ValueError):
    """A command line that cannot be done."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a source behind a web server."""

    token_file: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """File with the source's bearer token; else WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE."""
    ca_file: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """PEM of the private authority that signed the source's certificate; else WEIGHTSYNC_CA_FILE."""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """How others reach what is served. Beyond loopback, TLS and a token are required."""

    cert: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """PEM of the server's certificate, with its chain."""
    key: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """PEM of the certificate's key."""
    require_token_file: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """File with the bearer token that clients must show; else WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE."""


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    """Give out a store's directory over HTTP(S): ranges, conditional reads, leases."""

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The directory a publisher or a mirror writes."""
    listen: str = "127.0.0.1:8600"
    """HOST:PORT (port 0: any free one, printed)."""
    listening: Annotated[Listening, tyro.conf.arg(name="")] = Listening()


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """Bring a directory to the newest version: DIR/current/model.safetensors."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Directory or URL of the store."""
    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Where the weights go."""
    follow: bool = False
    """Stay, and bring each new version."""
    connections: int = 16
    """Ranges read at once from a store behind a link; 16 to 32 fill a long one."""
    mode: TransferMode = "auto"
    """auto: the fewest bytes; published: the rule of the AstraFlow paper."""
    json: bool = False
    """Print a report of each pull as JSON."""
    access: Annotated[Access, tyro.conf.arg(name="")] = Access()


class Mirror(msgspec.Struct, frozen=True, kw_only=True):
    """Follow a store into a directory, each byte fetched once, and give it out."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Directory or URL of the store to follow."""
    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The mirror's own directory."""
    serve: str = ""
    """HOST:PORT to serve the mirror at (port 0: any free one, printed); without it, the directory is all."""
    cut_through: bool = False
    """Name a version as soon as it is published; readers get its bytes as they arrive. Needs --serve."""
    connections: int = 16
    """Ranges read at once."""
    interval: float = 1.0
    """Seconds between looks for a new version."""
    once: bool = False
    """End when all that the source has is here."""
    json: bool = False
    """Print the state as JSON when it changes."""
    access: Annotated[Access, tyro.conf.arg(name="")] = Access()
    listening: Annotated[Listening, tyro.conf.arg(name="")] = Listening()


class Inspect(msgspec.Struct, frozen=True, kw_only=True):
    """Show what a store holds, from HEAD and the manifests alone."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Directory or URL of the store."""
    json: bool = False
    """Print JSON."""
    access: Annotated[Access, tyro.conf.arg(name="")] = Access()


class Verify(msgspec.Struct, frozen=True, kw_only=True):
    """Compute every digest anew: manifests, payloads, anchors and, by applying, the weights of every version."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Directory or URL of the store."""
    json: bool = False
    """Print JSON."""
    access: Annotated[Access, tyro.conf.arg(name="")] = Access()


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """Measure codecs, digests and applying on weights that are trained for it: minutes. Needs torch."""

    seed: int = 0
    """Of the model and its training steps."""
    report: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Markdown file to write; by default it is printed."""


COMMANDS: dict[str, Any] = {
    "serve": Serve,
    "pull": Pull,
    "mirror": Mirror,
    "inspect": Inspect,
    "verify": Verify,
    "bench": Bench,
}


def main() -> None:
    """Entry point of the `weightsync` command."""
    try:
        code = command(sys.argv[1:])
    except ValueError as error:
        fail(str(error), WRONG_USAGE)
    except WeightSyncError as error:
        fail(str(error), DAMAGED)
    except OSError as error:
        fail(describe(error), UNREACHABLE)
    except KeyboardInterrupt:
        fail("interrupted", 128 + signal.SIGINT)
    sys.exit(code)


def fail(message: str, code: int) -> NoReturn:
    print(f"weightsync: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def describe(error: OSError) -> str:
    """An error of the system with its file, one of ours as it is."""
    if error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def command(args: Sequence[str]) -> int:
    """Run a command line; its exit code. Raises ValueError, WeightSyncError, OSError."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return DONE
    name, rest = args[0], list(args[1:])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise UsageError(f"there is no command {name!r}; " + (f"did you mean {near[0]}?" if near else known()))
    config = (tyro.conf.FlagCreatePairsOff,)
    request = tyro.cli(COMMANDS[name], prog=f"weightsync {name}", args=rest, config=config)
    if isinstance(request, Bench):
        return bench(request)
    return anyio.run(interruptible, request, backend="asyncio")


def first_cause(error: Exception) -> Exception:
    """The first of a group, the error itself otherwise."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def known() -> str:
    return f"known: {', '.join(COMMANDS)}"


def bench(request: Bench) -> int:
    """All of it is work for the processor, so a signal ends the process as it ends any other."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("bench trains a model, which needs torch: pip install 'astraflow-weightsync[torch]'")
    from .bench import page, run

    results = run(request.seed, lambda told: print(told, file=sys.stderr, flush=True))
    text = page(results, request.seed)
    if request.report is None:
        print(text, end="")
    else:
        request.report.write_text(text)
        print(f"written to {request.report}")
    return DONE


async def interruptible(request: Any) -> int:
    """Run a request until it is done or a signal ends it; what it raised comes out as it is."""
    from . import commands

    stays = isinstance(request, Serve) or (isinstance(request, Mirror) and not request.once)
    stays = stays or (isinstance(request, Pull) and request.follow)
    code = DONE
    failures: list[Exception] = []

    async def work() -> None:
        nonlocal code
        try:
            code = await commands.run(request)
        except Exception as failure:
            failures.append(first_cause(failure))
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                code = DONE if stays else 128 + number
                break
        tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return code
