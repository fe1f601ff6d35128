"""Reading a GGUF file: its metadata and where its tensors lie (format: github.com/ggml-org/ggml, docs/gguf.md).

The ``gguf`` package reads the same, but takes two seconds for a vocabulary's strings, and answers a truncated file
with an IndexError from its depths.
"""

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


class GgufError(ValueError):
    """The file is not a GGUF file that we can use; one sentence, without the file's name."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # outermost first, as numpy has it; rows of the last dimension are stored together
    type: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size_bytes: int


# Value type -> struct format, of the types with a fixed size.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


class GgufFile:
    """An open GGUF file, mapped into memory. Raises GgufError if it is none, or is cut off."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise GgufError("the file is empty") from None
        self._at = 0
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def weight_bits(self) -> float:
        """How many bits a weight of the matrices takes, on average."""
        matrices = [tensor for tensor in self.tensors.values() if len(tensor.shape) > 1]
        weights = sum(math.prod(tensor.shape) for tensor in matrices)
        return 8 * sum(tensor.size_bytes for tensor in matrices) / max(weights, 1)

    def close(self) -> None:
        # An array that still looks into the mapping keeps it; it goes with the array.
        with contextlib.suppress(BufferError):
            self.data.close()

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self) -> None:
        if self.data[:4] != b"GGUF":
            raise GgufError("it doesn't begin with the letters GGUF")
        try:
            self._at = 4
            version = self._scalar("<I")
            if version not in (2, 3):
                raise GgufError(f"it has version {version} of the format; versions 2 and 3 are supported")
            tensors, values = self._scalar("<Q"), self._scalar("<Q")
            self.metadata: dict[str, Any] = {}
            for _ in range(values):
                key = self._string()
                self.metadata[key] = self._value(self._scalar("<I"))
            headers = [self._tensor_header() for _ in range(tensors)]
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError):
            raise GgufError("its header is cut off or damaged") from None
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise GgufError(f"its alignment {alignment!r} makes no sense")
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, type_, offset in headers:
            block, block_bytes = GGML_QUANT_SIZES[type_]
            if not shape or 0 in shape or shape[-1] % block:
                raise GgufError(f"tensor {name!r} has the shape {shape}, which {type_.name} can't have")
            tensor = GgufTensor(name, shape, type_, start + offset, math.prod(shape) // block * block_bytes)
            if tensor.offset + tensor.size_bytes > len(self.data):
                raise GgufError(
                    f"it is cut off: tensor {name!r} ends at byte {tensor.offset + tensor.size_bytes:_}, "
                    f"the file at {len(self.data):_}"
                )
            self.tensors[name] = tensor

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self._at)
        self._at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        text = self.data[self._at : self._at + length]
        if len(text) != length:
            raise struct.error
        self._at += length
        return text.decode()

    def _value(self, type_: int) -> Any:
        if type_ == _STRING:
            return self._string()
        if type_ == _ARRAY:
            item, length = self._scalar("<I"), self._scalar("<Q")
            if item in _SCALARS:
                layout = f"<{length}{_SCALARS[item][1]}"
                values = struct.unpack_from(layout, self.data, self._at)
                self._at += struct.calcsize(layout)
                return list(values)
            return [self._value(item) for _ in range(length)]
        if type_ not in _SCALARS:
            raise struct.error
        return self._scalar(_SCALARS[type_])

    def _tensor_header(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        dimensions = self._scalar("<I")
        shape = tuple(self._scalar("<Q") for _ in range(dimensions))[::-1]
        number = self._scalar("<I")
        try:
            type_ = GGMLQuantizationType(number)
        except ValueError:
            raise GgufError(f"tensor {name!r} has the unknown quantization type {number}") from None
        return name, shape, type_, self._scalar("<Q")
