"""The messages of KEDA's gRPC service ``externalscaler.ExternalScaler``.

https://keda.sh/docs/latest/concepts/external-scalers/ describes the protocol. Its few small messages are declared here,
because a generated module would have to match the version of the installed protobuf.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClassesForFiles

_PACKAGE: Final = "externalscaler"
_FILE: Final = "stoker/externalscaler.proto"
#: Full name of the gRPC service.
SERVICE: Final = f"{_PACKAGE}.ExternalScaler"

_Type = FieldDescriptorProto
#: Fields of each message: name, number, type (or the name of a message), and whether the field is repeated.
_MESSAGES: Final[dict[str, tuple[tuple[str, int, int | str, bool], ...]]] = {
    "ScaledObjectRef": (
        ("name", 1, _Type.TYPE_STRING, False),
        ("namespace", 2, _Type.TYPE_STRING, False),
        ("scalerMetadata", 3, "ScaledObjectRef.ScalerMetadataEntry", True),
    ),
    "IsActiveResponse": (("result", 1, _Type.TYPE_BOOL, False),),
    "MetricSpec": (("metricName", 1, _Type.TYPE_STRING, False), ("targetSizeFloat", 3, _Type.TYPE_DOUBLE, False)),
    "GetMetricSpecResponse": (("metricSpecs", 1, "MetricSpec", True),),
    "GetMetricsRequest": (
        ("scaledObjectRef", 1, "ScaledObjectRef", False),
        ("metricName", 2, _Type.TYPE_STRING, False),
    ),
    "MetricValue": (("metricName", 1, _Type.TYPE_STRING, False), ("metricValueFloat", 3, _Type.TYPE_DOUBLE, False)),
    "GetMetricsResponse": (("metricValues", 1, "MetricValue", True),),
}


def _describe(message: DescriptorProto, fields: tuple[tuple[str, int, int | str, bool], ...]) -> None:
    for name, number, kind, repeated in fields:
        label = _Type.LABEL_REPEATED if repeated else _Type.LABEL_OPTIONAL
        field = message.field.add(name=name, number=number, label=label)
        if isinstance(kind, str):
            field.type, field.type_name = _Type.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
        else:
            field.type = kind


def _make() -> dict[str, Any]:
    file = FileDescriptorProto(name=_FILE, package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        _describe(file.message_type.add(name=name), fields)
    # A map is a list of entries, each with a key and a value.
    entry = file.message_type[0].nested_type.add(name="ScalerMetadataEntry")
    entry.options.map_entry = True
    _describe(entry, (("key", 1, _Type.TYPE_STRING, False), ("value", 2, _Type.TYPE_STRING, False)))
    pool = DescriptorPool()
    pool.Add(file)
    classes: dict[str, Any] = GetMessageClassesForFiles([_FILE], pool)
    return classes


_CLASSES: Final = _make()
ScaledObjectRef: Final = _CLASSES[f"{_PACKAGE}.ScaledObjectRef"]
IsActiveResponse: Final = _CLASSES[f"{_PACKAGE}.IsActiveResponse"]
MetricSpec: Final = _CLASSES[f"{_PACKAGE}.MetricSpec"]
GetMetricSpecResponse: Final = _CLASSES[f"{_PACKAGE}.GetMetricSpecResponse"]
GetMetricsRequest: Final = _CLASSES[f"{_PACKAGE}.GetMetricsRequest"]
MetricValue: Final = _CLASSES[f"{_PACKAGE}.MetricValue"]
GetMetricsResponse: Final = _CLASSES[f"{_PACKAGE}.GetMetricsResponse"]
