"""From a line of configuration to a data algorithm: `name`, `name(option=value, ...)` or `package.module:Name(...)`.

An algorithm is a class; its options are its constructor's parameters, typed by their annotations (`context` is given,
not an option). A function will do where its kind says how one is wrapped. Names are AstraFlow's own or registered by
an installed distribution in the entry-point group `astraflow.data_algorithms`.

Invariant: what `build` returns has every method of its kind; anything wrong is a ValueError that names the line, what
is wrong with it and the nearest right thing.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

import msgspec

from .stage import Context

GROUP = "astraflow.data_algorithms"

T = TypeVar("T")

_LINE = re.compile(r"\s*(?P<name>[\w.:-]+)\s*(?P<options>\(.*\))?\s*", re.DOTALL)


class Kind(Generic[T]):
    """A kind of data algorithm: the Protocol it keeps (runtime checkable), the built-in ones by name, and how a plain
    function becomes one."""

    def __init__(
        self,
        protocol: type[T],
        built_in: Mapping[str, Callable[..., T]],
        from_function: Callable[[Callable[..., Any]], T] | None = None,
    ) -> None:
        self.protocol = protocol
        self.built_in = built_in
        self.from_function = from_function

    @property
    def name(self) -> str:
        return self.protocol.__name__

    def build(self, line: str, context: Context) -> T:
        """The algorithm that a line of configuration asks for.

        Raises:
            ValueError: the line cannot be read, names nothing, or has an unknown or impossible option.
        """
        name, options = parse(line)
        factory = self._find(name, line)
        is_function = inspect.isfunction(factory)
        arguments = _arguments(factory, options, context, line, skip=1 if is_function else 0)
        try:
            made = self._wrap(factory, arguments, line) if is_function else factory(**arguments)
        except ValueError as error:
            raise ValueError(f"{line!r}: {error}") from error
        if not isinstance(made, self.protocol):
            wanted = sorted(name for name in dir(self.protocol) if not name.startswith("_"))
            missing = [name for name in wanted if not hasattr(made, name)]
            raise ValueError(f"{line!r} is no {self.name}: it lacks {', '.join(missing)}")
        return made

    def _wrap(self, function: Callable[..., Any], arguments: dict[str, Any], line: str) -> T:
        if self.from_function is None:
            raise ValueError(f"{line!r} is a function; a {self.name} must be a class")
        return self.from_function(lambda *given: function(*given, **arguments))

    def _find(self, name: str, line: str) -> Callable[..., Any]:
        if name in self.built_in:
            return self.built_in[name]
        if ":" in name:
            return _imported(name, line)
        installed = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name not in installed:
            raise ValueError(f"{line!r}: there is no {self.name} {name!r}{_near(name, {*self.built_in, *installed})}")
        return _callable(installed[name].load(), line)


def label(line: str) -> str:
    """The short name of what a line asks for, under which it is counted: `my.module:Name(limit=3)` is `Name`."""
    return parse(line)[0].rpartition(":")[2]


def labels(lines: Iterable[str]) -> list[str]:
    """The short names of a chain, each once: what comes again is numbered."""
    made: list[str] = []
    for name in map(label, lines):
        again = sum(other == name or other.startswith(f"{name}#") for other in made)
        made.append(f"{name}#{again + 1}" if again else name)
    return made


def parse(line: str) -> tuple[str, dict[str, Any]]:
    """The name and the options, whose values are Python literals.

    Raises:
        ValueError: it is not of this form.
    """
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"{line!r} cannot be read: write name, or name(option=value, ...)")
    text = match["options"] or "()"
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        assert isinstance(call, ast.Call)
        options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{line!r}: the options cannot be read: {error}") from error
    if call.args or any(word.arg is None for word in call.keywords):
        raise ValueError(f"{line!r}: options are given by name: name(option=value, ...)")
    return match["name"], options


def _arguments(
    factory: Callable[..., Any], options: Mapping[str, Any], context: Context, line: str, skip: int
) -> dict[str, Any]:
    """The options converted to the annotated types, and the context where it is asked for. `skip`: leading parameters
    that are no options."""
    named = [
        p for p in inspect.signature(factory).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    parameters = {parameter.name: parameter for parameter in named[skip:]}
    hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    made: dict[str, Any] = {"context": context} if "context" in parameters else {}
    for name, value in options.items():
        if name not in parameters or name == "context":
            raise ValueError(f"{line!r}: unknown option {name!r}{_near(name, parameters.keys() - {'context'})}")
        try:
            made[name] = msgspec.convert(value, hints.get(name, Any))
        except msgspec.ValidationError as error:
            raise ValueError(f"{line!r}: option {name!r}: {error}") from error
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in made:
            raise ValueError(f"{line!r}: the option {name!r} is missing")
    return made


def _imported(name: str, line: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{line!r}: the module {module!r} cannot be imported: {error}") from error
    if not hasattr(found, attribute):
        raise ValueError(f"{line!r}: {module} has no {attribute!r}{_near(attribute, vars(found).keys())}")
    return _callable(getattr(found, attribute), line)


def _callable(found: Any, line: str) -> Callable[..., Any]:
    if not callable(found):
        raise ValueError(f"{line!r} is of type {type(found).__name__}: it must be a class or a function")
    made: Callable[..., Any] = found
    return made


def _near(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else "; it takes none"
