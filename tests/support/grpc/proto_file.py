"""Builds descriptors and message classes of the official runtime from the project's .proto files.

It reads the few forms that the files have; protoc would need a compiler as a further dependency.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import gateway

FOLDER = Path(gateway.__file__).parent / "protocol" / "grpc"

_TOKEN = re.compile(r"[\w.]+|[{}()=;<>,]|\"[^\"]*\"")
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "double": _FIELD.TYPE_DOUBLE,
    "float": _FIELD.TYPE_FLOAT,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "string": _FIELD.TYPE_STRING,
    "uint32": _FIELD.TYPE_UINT32,
    "uint64": _FIELD.TYPE_UINT64,
}


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self._tokens = _TOKEN.findall(re.sub(r"//.*", "", text))
        self._at = 0
        self.file = descriptor_pb2.FileDescriptorProto(name=name)
        self._named: list[tuple[Any, str, str]] = []
        self._types: dict[str, Any] = {}
        while self._at < len(self._tokens):
            self._parse_statement()
        for field, name, scope in self._named:
            self._resolve(field, name, scope)

    def _parse_statement(self) -> None:
        keyword = self._next()
        if keyword == "syntax":
            self._expect("=")
            self.file.syntax = self._next().strip('"')
            self._expect(";")
        elif keyword == "package":
            self.file.package = self._next()
            self._expect(";")
        elif keyword == "enum":
            self._parse_enum(self.file.enum_type.add(), f".{self.file.package}")
        elif keyword == "service":
            self._parse_service(self.file.service.add())
        else:
            assert keyword == "message", keyword
            self._parse_message(self.file.message_type.add(), f".{self.file.package}")

    def _parse_service(self, service: Any) -> None:
        service.name = self._next()
        self._expect("{")
        while (word := self._next()) != "}":
            assert word == "rpc", word
            method = service.method.add(name=self._next())
            method.input_type, streams = self._parse_message_of_rpc()
            if streams:
                method.client_streaming = True
            self._expect("returns")
            method.output_type, streams = self._parse_message_of_rpc()
            if streams:
                method.server_streaming = True
            self._expect(";")

    def _parse_message_of_rpc(self) -> tuple[str, bool]:
        self._expect("(")
        name = self._next()
        if streams := name == "stream":
            name = self._next()
        self._expect(")")
        return f".{self.file.package}.{name}", streams

    def _parse_enum(self, enum: Any, scope: str) -> None:
        enum.name = self._next()
        self._types[f"{scope}.{enum.name}"] = _FIELD.TYPE_ENUM
        self._expect("{")
        while (value := self._next()) != "}":
            self._expect("=")
            enum.value.add(name=value, number=int(self._next()))
            self._expect(";")

    def _parse_message(self, message: Any, scope: str) -> None:
        message.name = self._next()
        scope = f"{scope}.{message.name}"
        self._types[scope] = _FIELD.TYPE_MESSAGE
        self._expect("{")
        while (word := self._next()) != "}":
            if word == "message":
                self._parse_message(message.nested_type.add(), scope)
            elif word == "enum":
                self._parse_enum(message.enum_type.add(), scope)
            elif word == "oneof":
                self._parse_oneof(message, scope)
            elif word == "map":
                self._parse_map(message, scope)
            elif word == "repeated":
                self._parse_field(message, self._next(), _FIELD.LABEL_REPEATED, scope)
            else:
                self._parse_field(message, word, _FIELD.LABEL_OPTIONAL, scope)

    def _parse_oneof(self, message: Any, scope: str) -> None:
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=self._next())
        self._expect("{")
        while (kind := self._next()) != "}":
            self._parse_field(message, kind, _FIELD.LABEL_OPTIONAL, scope).oneof_index = index

    def _parse_map(self, message: Any, scope: str) -> None:
        self._expect("<")
        key = self._next()
        self._expect(",")
        value = self._next()
        self._expect(">")
        entry_name = f"{self._tokens[self._at].title().replace('_', '')}Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        self._types[f"{scope}.{entry_name}"] = _FIELD.TYPE_MESSAGE
        self._add_field(entry, "key", 1, key, _FIELD.LABEL_OPTIONAL, scope)
        self._add_field(entry, "value", 2, value, _FIELD.LABEL_OPTIONAL, scope)
        self._parse_field(message, entry_name, _FIELD.LABEL_REPEATED, scope)

    def _parse_field(self, message: Any, kind: str, label: Any, scope: str) -> Any:
        name = self._next()
        self._expect("=")
        number = int(self._next())
        self._expect(";")
        return self._add_field(message, name, number, kind, label, scope)

    def _add_field(
        self, message: Any, name: str, number: int, kind: str, label: Any, scope: str
    ) -> Any:
        # As protoc has it: some clients take it from here for their JSON.
        json_name = re.sub("_(.?)", lambda match: match[1].upper(), name)
        field = message.field.add(name=name, number=number, label=label, json_name=json_name)
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            self._named.append((field, kind, scope))
        return field

    def _resolve(self, field: Any, name: str, scope: str) -> None:
        """Set a field's type: the message or enumeration in the closest scope that has it."""
        while f"{scope}.{name}" not in self._types:
            assert scope, name
            scope = scope.rpartition(".")[0]
        field.type_name = f"{scope}.{name}"
        field.type = self._types[field.type_name]

    def _next(self) -> str:
        self._at += 1
        return str(self._tokens[self._at - 1])

    def _expect(self, token: str) -> None:
        assert self._next() == token, (token, self._tokens[self._at - 3 : self._at + 3])


def parse_proto(text: str, name: str) -> Any:
    """Return the descriptor of a .proto file; ``name`` is the file's name for others."""
    return _Parser(text, name).file


def proto_files() -> Any:
    """Return the descriptors of all files, a FileDescriptorSet, with their public names."""
    inference, health, reflection = (
        (FOLDER / f"{name}.proto").read_text() for name in ("inference", "health", "reflection")
    )
    alpha = reflection.replace("package grpc.reflection.v1;", "package grpc.reflection.v1alpha;")
    files = (
        (inference, "inference.proto"),
        (health, "grpc/health/v1/health.proto"),
        (reflection, "grpc/reflection/v1/reflection.proto"),
        (alpha, "grpc/reflection/v1alpha/reflection.proto"),
    )
    return descriptor_pb2.FileDescriptorSet(file=[parse_proto(*each) for each in files])


def make_pool(files: Any) -> Any:
    """Return a pool with the files of a FileDescriptorSet."""
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


_POOL = make_pool(proto_files())


def message_class(name: str) -> Any:
    """Return the class of a message of the inference protocol, or of one by its full name."""
    full_name = name if name.startswith("grpc.") else f"inference.{name}"
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(full_name))


InferParameter = message_class("InferParameter")
InferTensorContents = message_class("InferTensorContents")
ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")
