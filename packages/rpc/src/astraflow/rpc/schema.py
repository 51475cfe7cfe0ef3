"""What a method table looks like on the wire, and whether two of them understand each other.

A `Table` is plain data: every method's kind and the shapes of its messages, structures by name. It travels in the
handshake, so that both sides can say exactly what differs. Compatible means: whatever one side may write, the other
reads. A new optional field is; a new required one, another type or another method is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as mi

Value = str | int | None


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """A type: a scalar's name; `array`, `tuple`, `map`, `union` of `items`; `literal` of `values`; `struct` `name`."""

    kind: str
    items: tuple[Shape, ...] = ()
    name: str = ""
    values: tuple[Value, ...] = ()

    def __str__(self) -> str:
        if self.kind == "struct":
            return self.name
        if self.kind == "literal":
            return f"literal{list(self.values)}"
        if self.kind == "union":
            return " | ".join(map(str, self.items))
        return f"{self.kind}[{', '.join(map(str, self.items))}]" if self.items else self.kind


class Field(msgspec.Struct, frozen=True, array_like=True):
    name: str
    shape: Shape
    required: bool


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """A structure. `positional`: an array on the wire; `sparse`: defaults are left out; `closed`: refuses unknowns."""

    fields: tuple[Field, ...]
    positional: bool = False
    sparse: bool = False
    closed: bool = False
    tag_field: str | None = None
    tag: str | int | None = None


class MethodShape(msgspec.Struct, frozen=True, array_like=True):
    stream: bool
    request: Shape | None
    response: Shape


class Table(msgspec.Struct, frozen=True, array_like=True):
    """An interface: `methods` by name, `layouts` of every structure they mention."""

    interface: str
    methods: dict[str, MethodShape]
    layouts: dict[str, Layout]

    def fingerprint(self) -> str:
        """16 hex digits over methods and layouts; the interface's own name does not count."""
        text = msgspec.json.encode([self.methods, self.layouts], order="deterministic")
        return hashlib.sha256(text).hexdigest()[:16]


SCALARS: dict[type[mi.Type], str] = {
    mi.AnyType: "any",
    mi.RawType: "any",
    mi.NoneType: "none",
    mi.BoolType: "bool",
    mi.IntType: "int",
    mi.FloatType: "float",
    mi.StrType: "str",
    mi.BytesType: "bytes",
    mi.ByteArrayType: "bytes",
    mi.MemoryViewType: "bytes",
    mi.DateTimeType: "datetime",
    mi.DateType: "date",
    mi.TimeType: "time",
    mi.TimeDeltaType: "timedelta",
    mi.UUIDType: "uuid",
    mi.DecimalType: "decimal",
}


class ShapeBuilder:
    """Turns types into shapes, collecting the layouts they mention."""

    def __init__(self) -> None:
        self.layouts: dict[str, Layout] = {}
        self._names: dict[Any, str] = {}

    def shape(self, annotation: Any) -> Shape:
        """Raises TypeError for a type that cannot travel."""
        return self._shape(mi.type_info(annotation))

    def _shape(self, info: mi.Type) -> Shape:
        scalar = SCALARS.get(type(info))
        if scalar is not None:
            return Shape(scalar)
        match info:
            case mi.Metadata(type=inner):
                return self._shape(inner)
            case mi.ListType() | mi.VarTupleType() | mi.SetType() | mi.FrozenSetType():
                return Shape("array", (self._shape(info.item_type),))
            case mi.TupleType():
                return Shape("tuple", tuple(map(self._shape, info.item_types)))
            case mi.DictType():
                return Shape("map", (self._shape(info.key_type), self._shape(info.value_type)))
            case mi.UnionType():
                return Shape("union", tuple(sorted(map(self._shape, info.types), key=str)))
            case mi.LiteralType():
                return Shape("literal", values=tuple(sorted(info.values, key=repr)))
            case mi.EnumType():
                return Shape("literal", values=tuple(sorted((member.value for member in info.cls), key=repr)))
            case mi.StructType() | mi.DataclassType() | mi.TypedDictType() | mi.NamedTupleType():
                return Shape("struct", name=self._layout(info))
        raise TypeError(f"{type(info).__name__} cannot be part of a message")

    def _layout(self, info: mi.StructType | mi.DataclassType | mi.TypedDictType | mi.NamedTupleType) -> str:
        if info.cls in self._names:
            return self._names[info.cls]
        name: str = getattr(info.cls, "__name__", str(info.cls))
        if name in self._names.values():
            name = f"{info.cls.__module__}.{info.cls.__qualname__}"
        self._names[info.cls] = name
        fields = tuple(Field(field.encode_name, self._shape(field.type), field.required) for field in info.fields)
        if isinstance(info, mi.StructType):
            sparse = bool(info.cls.__struct_config__.omit_defaults)
            closed = info.forbid_unknown_fields
            self.layouts[name] = Layout(fields, info.array_like, sparse, closed, info.tag_field, info.tag)
        else:
            self.layouts[name] = Layout(fields, positional=isinstance(info, mi.NamedTupleType))
        return name


def differences(client: Table, server: Table) -> list[str]:
    """What keeps a client from talking to a server, one line each; empty if they understand each other."""
    found = [f"method {name}: only the client has it" for name in client.methods if name not in server.methods]
    found += [f"method {name}: only the server has it" for name in server.methods if name not in client.methods]
    requests = _Reading(client.layouts, server.layouts)
    responses = _Reading(server.layouts, client.layouts)
    for name in sorted(client.methods.keys() & server.methods.keys()):
        ours, theirs = client.methods[name], server.methods[name]
        if ours.stream != theirs.stream:
            found.append(f"method {name}: a stream on one side, a single result on the other")
        if ours.request is None or theirs.request is None:
            if ours.request != theirs.request:
                found.append(f"method {name}: an argument on one side, none on the other")
        else:
            found += [f"request of {name}: {text}" for text in requests.problems(ours.request, theirs.request)]
        found += [f"result of {name}: {text}" for text in responses.problems(theirs.response, ours.response)]
    return list(dict.fromkeys(found))


class _Reading:
    """Can the reader read whatever the writer may write? Structures under comparison are assumed to fit (recursion)."""

    def __init__(self, writer: dict[str, Layout], reader: dict[str, Layout]) -> None:
        self._writer = writer
        self._reader = reader
        self._known: dict[tuple[str, str], list[str]] = {}

    def problems(self, written: Shape, wanted: Shape) -> list[str]:
        if wanted.kind == "any":
            return []
        if written.kind == "union":
            return [text for item in written.items for text in self.problems(item, wanted)]
        if wanted.kind == "union":
            return [] if any(not self.problems(written, item) for item in wanted.items) else [_clash(written, wanted)]
        if written.kind == "literal":
            return [] if all(_accepts(wanted, value) for value in written.values) else [_clash(written, wanted)]
        if written.kind == "tuple" and wanted.kind == "array":
            return [text for item in written.items for text in self.problems(item, wanted.items[0])]
        if written.kind == "int" and wanted.kind == "float":
            return []
        if written.kind != wanted.kind or len(written.items) != len(wanted.items):
            return [_clash(written, wanted)]
        if written.kind == "struct":
            return self._structures(written.name, wanted.name)
        pairs = zip(written.items, wanted.items, strict=True)
        return [text for ours, theirs in pairs for text in self.problems(ours, theirs)]

    def _structures(self, written: str, wanted: str) -> list[str]:
        key = (written, wanted)
        if key not in self._known:
            self._known[key] = []
            writer, reader = self._writer.get(written), self._reader.get(wanted)
            if writer is None or reader is None:
                self._known[key] = [f"{wanted}: the table does not describe it"]
            else:
                self._known[key] = [f"{wanted}{text}" for text in self._layouts(writer, reader)]
        return self._known[key]

    def _layouts(self, writer: Layout, reader: Layout) -> Iterator[str]:
        if (writer.positional, writer.tag_field, writer.tag) != (reader.positional, reader.tag_field, reader.tag):
            yield ": its encoding (array_like, tag) differs"
        elif writer.positional:
            yield from self._positional(writer, reader)
        else:
            yield from self._named(writer, reader)

    def _named(self, writer: Layout, reader: Layout) -> Iterator[str]:
        fields = {field.name: field for field in writer.fields}
        for wanted in reader.fields:
            field = fields.pop(wanted.name, None)
            if field is None:
                if wanted.required:
                    yield f".{wanted.name}: required by one side, unknown to the other"
                continue
            if wanted.required and writer.sparse and not field.required:
                yield f".{wanted.name}: required by one side, left out by the other when it has its default"
            for text in self.problems(field.shape, wanted.shape):
                yield f".{wanted.name}: {text}"
        if reader.closed:
            yield from (f".{name}: refused by one side (forbid_unknown_fields)" for name in fields)

    def _positional(self, writer: Layout, reader: Layout) -> Iterator[str]:
        for field, wanted in zip(writer.fields, reader.fields, strict=False):
            if field.name != wanted.name:
                yield f": {field.name} where {wanted.name} is expected"
                return
            for text in self.problems(field.shape, wanted.shape):
                yield f".{wanted.name}: {text}"
        for wanted in reader.fields[len(writer.fields) :]:
            if wanted.required:
                yield f".{wanted.name}: required by one side, unknown to the other"
        if reader.closed:
            extra = writer.fields[len(reader.fields) :]
            yield from (f".{field.name}: refused by one side (forbid_unknown_fields)" for field in extra)


def _clash(written: Shape, wanted: Shape) -> str:
    return f"{written} is written, {wanted} is read"


def _accepts(wanted: Shape, value: Value) -> bool:
    if wanted.kind == "literal":
        return value in wanted.values
    kinds = {str: ("str",), int: ("int", "float"), type(None): ("none",)}
    return wanted.kind in kinds[type(value)]
