"""The `recipes` command: `list`, a recipe's name, `resume`, `inspect`, `serve`, `drive`, `certificates`.

Invariant: nothing heavy (torch, transformers) is imported before the command line is known to be right, and an error a
person can mend is shown as one message, not as a traceback.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import anyio
import msgspec
import tyro
from rich.console import Console
from rich.table import Table

from .config import ConfigError, RunConfig, check, merge, read_toml, resolve, to_toml, trained
from .credentials import credentials_of
from .recipe import Recipe
from .registry import load_recipe, recipe_names
from .rundir import RunDirectory, write_atomic

USAGE = """usage: recipes COMMAND [OPTIONS]

  recipes list                     the recipes, one line each
  recipes NAME [OPTIONS]           run a recipe (recipes NAME --help shows every option)
  recipes resume DIR               go on with a run that was stopped or killed
  recipes inspect DIR [OPTIONS]    what a run's journal holds (recipes inspect --help)
  recipes serve dataflow|raas|trainer --run DIR …
                                   one service of a run in this process
  recipes drive --run DIR --join ADDRESS
                                   take a run whose services were started by hand from start to end
  recipes certificates DIR --host NAME …
                                   a private CA, certificates and a token for services on several machines
"""


PLAIN_WIDTH = 140
"""Columns of what is written to a file or a pipe."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a run."""

    run: Annotated[Any, tyro.conf.arg(name="")]
    preset: str = ""
    """Named set of options to start from."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """TOML file laid over the preset; the command line is laid over both."""
    dry_run: bool = False
    """Print the resolved configuration and stop."""
    print_commands: bool = False
    """Make the run's directory and print the commands that start its services by hand."""


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """Go on with a run from its checkpoints and its journal, as it was configured."""

    directory: tyro.conf.Positional[Path]
    """The run's directory."""


class Secured(msgspec.Struct, frozen=True, kw_only=True):
    """How a service and its peers know each other at a tls:// address."""

    tls: Path | None = None
    """Directory that `recipes certificates` wrote."""
    token_file: Path | None = None
    """File with the token; by default `token` in the --tls directory."""


class ServeDataflow(Secured, frozen=True, kw_only=True):
    """Serve a run's dataflow."""

    run: Path
    """The run's directory."""
    listen: str = "tcp://127.0.0.1:0"
    """Address to listen at: unix:PATH, tcp://127.0.0.1:PORT or tls://HOST:PORT (port 0: any free one, printed)."""


class ServeRaas(Secured, frozen=True, kw_only=True):
    """Join a run as a rollout worker."""

    run: Path
    """The run's directory."""
    join: str
    """The dataflow's address."""
    worker_id: str = "worker-0"
    """Name of this worker, unique in the run."""


class ServeTrainer(Secured, frozen=True, kw_only=True):
    """Train one policy of a run."""

    run: Path
    """The run's directory."""
    join: str
    """The dataflow's address."""
    policy: str
    """The policy to train."""


class Drive(Secured, frozen=True, kw_only=True):
    """Take a run whose services were started by hand from start to end."""

    run: Path
    """The run's directory."""
    join: str
    """The dataflow's address."""


class Certificates(msgspec.Struct, frozen=True, kw_only=True):
    """Write a private CA, a server's and a client's certificate and a token; run again, renew the certificates."""

    directory: tyro.conf.Positional[Path]
    """Where to. A server needs ca, server, server-key and token, a client ca, client, client-key and token."""
    host: tuple[str, ...] = ()
    """Names and IP addresses by which clients reach the server; localhost always is one."""
    days: int = 365
    """How long the server's and the client's certificate are valid."""


def main() -> None:
    """Entry point of the `recipes` command."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    try:
        command(sys.argv[1:], console)
    except ConfigError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def fail(message: str, code: int) -> NoReturn:
    print(f"recipes: {message}", file=sys.stderr)
    sys.exit(code)


def command(args: Sequence[str], console: Console) -> None:
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE)
        return
    name, rest = args[0], list(args[1:])
    match name:
        case "list":
            list_recipes(console)
        case "resume":
            resume_command(rest, console)
        case "inspect":
            inspect_command(rest)
        case "serve":
            serve_command(rest, console)
        case "drive":
            drive_command(rest, console)
        case "certificates":
            certificates_command(rest)
        case _ if name in recipe_names():
            run_command(load_recipe(name), rest, console)
        case _:
            known = ["list", "resume", "inspect", "serve", "drive", "certificates", *recipe_names()]
            raise ConfigError(f"there is no command or recipe {name!r}; {hint(name, known)}")


def hint(name: str, known: Sequence[str]) -> str:
    """What was meant by `name`: a longer or a similar name, or all there are."""
    near = [k for k in known if k.startswith(name)] or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if len(near) == 1 else f"known: {', '.join(known)}"


def list_recipes(console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "policies", "presets", ""):
        table.add_column(column)
    for name in recipe_names():
        recipe = load_recipe(name)
        config = recipe.presets[recipe.default_preset]
        table.add_row(name, ", ".join(config.policies), ", ".join(recipe.presets), recipe.summary)
    console.print(table)


def preset_name(recipe: Recipe[Any], args: Sequence[str]) -> str:
    """The preset that `args` ask for, or the one for this machine.

    Raises:
        ConfigError: there is no such preset.
    """
    asked = option(args, "--preset")
    if asked is None:
        return recipe.gpu_preset if has_gpu() else recipe.default_preset
    if asked not in recipe.presets:
        raise ConfigError(f"--preset {asked}: {recipe.name} has no such preset; {hint(asked, list(recipe.presets))}")
    return asked


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA device, found without importing torch (which takes seconds)."""
    return Path("/dev/nvidia0").exists()


def option(args: Sequence[str], name: str) -> str | None:
    """The value of an option that must be known before the others can be parsed: `--name value` or `--name=value`."""
    for index, arg in enumerate(args):
        if arg == name and index + 1 < len(args):
            return args[index + 1]
        if arg.startswith(f"{name}="):
            return arg.removeprefix(f"{name}=")
    return None


def parse_run(recipe: Recipe[Any], args: Sequence[str]) -> tuple[Launch, RunConfig]:
    """Preset, then --config, then the command line; checked.

    Raises:
        ConfigError: what cannot be run, and why.
    """
    preset = preset_name(recipe, args)
    base: RunConfig = recipe.presets[preset]
    file = option(args, "--config")
    if file is not None:
        overrides = read_toml(Path(file))
        named = overrides.pop("recipe", recipe.name)
        if named != recipe.name:
            raise ConfigError(f"--config {file} is for the recipe {named}, not for {recipe.name}")
        base = merge(base, overrides, file)
    launch_type = msgspec.defstruct(
        "Launch",
        [("run", Annotated[type(base), tyro.conf.arg(name="")])],
        bases=(Launch,),
        frozen=True,
        kw_only=True,
        module=__name__,
    )
    launch = tyro.cli(
        launch_type,
        prog=f"recipes {recipe.name}",
        description=f"{recipe.summary}\n\nPresets: {', '.join(recipe.presets)}.",
        args=list(args),
        default=launch_type(run=base, preset=preset),
    )
    assert isinstance(launch, Launch)
    config = resolve(launch.run)
    check(config)
    return launch, config


def run_command(recipe: Recipe[Any], args: Sequence[str], console: Console) -> None:
    launch, config = parse_run(recipe, args)
    if launch.dry_run:
        print(f'recipe = "{recipe.name}"\n\n{to_toml(config)}', end="")
        return
    if launch.print_commands:
        print_commands(recipe, config)
        return
    prepare(recipe, config, console)
    run = RunDirectory.create(config, recipe.name)
    console.print(f"{recipe.name}: writing to {run.path}", highlight=False)
    if recipe.comparison:
        module, _, function = recipe.comparison.partition(":")
        compare = getattr(importlib.import_module(module), function)
        execute(run.logs / "run.log", console, lambda: compare(recipe, config, run, console), config.debug)
        return
    run_it(recipe, config, run, console)


def run_it(recipe: Recipe[Any], config: RunConfig, run: RunDirectory, console: Console) -> None:
    """Run in one process or split, as configured, to the end."""
    if config.split:
        from .split import run_split as whole
    else:
        from .inprocess import run_in_process as whole
    finish(recipe, run, config, console, lambda: whole(recipe, config, run, console))


def resume_command(args: Sequence[str], console: Console) -> None:
    from astraflow.dataflow import JournalError, reopen_journal

    request = tyro.cli(Resume, prog="recipes resume", args=list(args))
    recipe, config, run = open_run(request.directory)
    if recipe.comparison or config.debug:
        raise ConfigError(f"{run.path} cannot be resumed: a comparison or a debugged run starts anew")
    try:
        reopen_journal(run.journal)
    except JournalError as error:
        raise ConfigError(f"{run.path} cannot be resumed: {error}") from error
    prepare(recipe, config, console)
    console.print(f"{recipe.name}: going on in {run.path}", highlight=False)
    run_it(recipe, config, run, console)


def inspect_command(args: Sequence[str]) -> None:
    from astraflow.dataflow import inspect_journal

    inspect_journal([*args], prog="recipes inspect", place=lambda path: RunDirectory(path).journal)


def prepare(recipe: Recipe[Any], config: RunConfig, console: Console) -> None:
    """Find the device and the models before the run has a directory: without them each of its services would fail.

    Raises:
        ConfigError: no such device or model.
    """
    from .models import resolve_model
    from .services import resolve_device

    models = {policy.model for policy in config.policies.values()}
    console.print(f"{recipe.name}: preparing {', '.join(sorted(models))}", highlight=False)
    resolve_device(config.device)
    for model in sorted(models):
        resolve_model(model)


def finish(
    recipe: Recipe[Any], run: RunDirectory, config: RunConfig, console: Console, work: Callable[[], Awaitable[Any]]
) -> None:
    """Run the work, write its summary and show it."""
    from .summary import footer, table

    summary = execute(run.logs / "run.log", console, work, config.debug)
    write_atomic(run.summary_file, msgspec.json.format(msgspec.json.encode(summary), indent=2))
    if summary.rows:
        console.print(table(summary))
    console.print(footer(summary), highlight=False)
    console.print(f"everything is in {run.path}: policies/, trajectories.jsonl, metrics.jsonl, summary.json")


def execute(log: Path, console: Console, work: Callable[[], Awaitable[Any]], debug: bool) -> Any:
    """Run `work` on uvloop; a failure is shown as its one cause (in full with --debug, else in the log file)."""
    from astraflow.raas import first_cause

    from .logs import setup_logging, show_failure

    setup_logging(log, lambda text: console.print(text, highlight=False, markup=False))
    try:
        return anyio.run(work, backend="asyncio", backend_options={"use_uvloop": sys.platform != "win32"})
    except Exception as error:
        cause = first_cause(error)
        show_failure(cause, log, debug)
        sys.exit(2 if isinstance(cause, ConfigError) else 1)


def open_run(path: Path) -> tuple[Recipe[Any], RunConfig, RunDirectory]:
    """The recipe and configuration of an existing run directory.

    Raises:
        ConfigError: it is not a run's directory.
    """
    run = RunDirectory(path)
    if not run.config_file.exists():
        raise ConfigError(f"{path} is not a run's directory: it has no config.toml")
    table = read_toml(run.config_file)
    name = table.pop("recipe", None)
    if name not in recipe_names():
        raise ConfigError(f"{run.config_file} names no known recipe; known: {', '.join(recipe_names())}")
    recipe = load_recipe(name)
    config = merge(recipe.presets[recipe.default_preset], table, str(run.config_file))
    check(config)
    return recipe, config, run


def print_commands(recipe: Recipe[Any], config: RunConfig) -> None:
    from .serve import free_port, serve_commands

    run = RunDirectory.create(config, recipe.name)
    address = f"tcp://127.0.0.1:{free_port()}"
    print("each in a shell of its own, in this directory; the last shows the run:", file=sys.stderr)
    for argv in serve_commands(trained(config), config.rollout.workers, run.path, address).values():
        print(f"recipes {' '.join(argv)}")
    print(f"recipes drive --run {run.path} --join {address}")


SERVICES = {"dataflow": ServeDataflow, "raas": ServeRaas, "trainer": ServeTrainer}
Service = Literal["dataflow", "raas", "trainer"]


def serve_command(args: Sequence[str], console: Console) -> None:
    from . import serve

    serve.die_with_supervisor()
    if args and args[0] in ("-h", "--help"):
        print(USAGE)
        return
    if not args or args[0] not in SERVICES:
        raise ConfigError(f"serve what? one of: {', '.join(SERVICES)}")
    name = args[0]
    request: Any = tyro.cli(SERVICES[name], prog=f"recipes serve {name}", args=list(args[1:]))
    recipe, config, run = open_run(request.run)
    role = "server" if name == "dataflow" else "client"
    known = credentials_of(role, request.tls, request.token_file)
    match request:
        case ServeDataflow():
            label, work = "dataflow", partial(serve.serve_dataflow, recipe, config, run, request.listen, known)
        case ServeRaas():
            label = request.worker_id
            work = partial(serve.serve_raas, recipe, config, request.join, label, known)
        case _:
            label = f"trainer-{request.policy}"
            work = partial(serve.serve_trainer, recipe, config, run, request.join, request.policy, known)
    execute(run.logs / f"{label}.jsonl", console, work, config.debug)


def drive_command(args: Sequence[str], console: Console) -> None:
    from .split import drive_by_hand

    request = tyro.cli(Drive, prog="recipes drive", args=list(args))
    recipe, config, run = open_run(request.run)
    known = credentials_of("client", request.tls, request.token_file)
    finish(recipe, run, config, console, lambda: drive_by_hand(recipe, config, request.join, console, known))


def certificates_command(args: Sequence[str]) -> None:
    from .certificates import write_certificates

    request = tyro.cli(Certificates, prog="recipes certificates", args=list(args))
    if request.days < 1:
        raise ConfigError(f"--days is {request.days}; it must be above 0")
    for path in write_certificates(request.directory, request.host, request.days):
        print(path)
