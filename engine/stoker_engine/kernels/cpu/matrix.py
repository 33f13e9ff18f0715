"""Binding of matrix.cpp: linear operations with a weight in any memory layout."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from stoker_engine.kernels import concat_linear as reference
from stoker_engine.kernels.bundle import Operation

#: `Kind` of matrix.h.
ROWS, PANELS, GGUF, GGUF_PANELS, GROUPS, GROUP_PANELS, CONCAT, EXTENDED = range(8)

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
_LONGEST_FORMAT: Final = 5


class Matrix(ctypes.Structure):
    """`Matrix` of matrix.h."""

    _fields_ = (
        ("kind", _LONG),
        ("format", _LONG * _LONGEST_FORMAT),
        ("w", _POINTER),
        ("stride", _LONG),
        ("bias", _POINTER),
        ("outputs", _LONG),
        ("inner", _LONG),
    )


class LinearArgs(ctypes.Structure):
    """`LinearArgs` of matrix.h."""

    _fields_ = (
        ("x", _POINTER),
        ("x_stride", _LONG),
        ("y", _POINTER),
        ("y_stride", _LONG),
        ("rows", _LONG),
        ("prefetch_ranges", _POINTER),
        ("batch_rows", _POINTER),
    )


#: (context, is_bf16, arguments): adds a contribution that depends on `batch_rows` to `y`.
ADD_TO_LINEAR = ctypes.CFUNCTYPE(None, _POINTER, ctypes.c_int, ctypes.POINTER(LinearArgs))


class _Extension(ctypes.Structure):
    """`Extension` of matrix.h."""

    _fields_ = (("base", _POINTER), ("add", ADD_TO_LINEAR), ("context", _POINTER))


class CpuLinear:
    """The linear operation with one weight: [..., inner] → [..., outputs].

    Attributes:
        matrix: the weight as C++ gets it.
    """

    __slots__ = ("_batch_rows", "_dtype", "_function", "_is_bf16", "_kept", "_pointer", "_shape", "matrix")

    def __init__(
        self,
        library: ctypes.CDLL,
        matrix: Matrix,
        dtype: torch.dtype,
        kept: object,
        batch_rows: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            dtype: dtype of x and the result.
            kept: objects that `matrix` points to, kept alive by this one.
            batch_rows: returns int64 [tokens], the row of the input batch of each row of x; None if the operation does
                not depend on it.
        """
        self.matrix, self._kept, self._shape = matrix, kept, (matrix.outputs, matrix.inner)
        self._batch_rows = batch_rows
        self._function, self._dtype, self._is_bf16 = library.stoker_linear, dtype, dtype == torch.bfloat16
        self._pointer = ctypes.addressof(matrix)

    @classmethod
    def of(
        cls,
        library: ctypes.CDLL,
        kind: int,
        stored: torch.Tensor,
        inner: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        format: Sequence[int] = (),
    ) -> CpuLinear:
        """Return the linear operation with a weight in one tensor.

        Args:
            kind: kind of the layout, such as `ROWS`.
            stored: [outputs, …], may be strided by rows; must keep its address.
            format: see matrix.h.
        """
        assert stored.stride(1) == 1 or stored.shape[1] == 1
        assert bias is None or (bias.dtype == dtype and bias.is_contiguous())
        words = (_LONG * _LONGEST_FORMAT)(*format)
        pointer = None if bias is None else bias.data_ptr()
        matrix = Matrix(kind, words, stored.data_ptr(), stored.stride(0), pointer, len(stored), inner)
        return cls(library, matrix, dtype, (stored, bias))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of x and the result."""
        return self._dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        outputs, inner = self._shape
        if x.dim() != 2 or (x.stride(1) != 1 and inner > 1):
            return self(x.reshape(-1, inner).contiguous()).view(*x.shape[:-1], outputs)
        rows, width = x.shape
        assert width == inner and x.dtype == self._dtype
        out = torch.empty((rows, outputs), dtype=self._dtype)
        batch_rows = None
        if self._batch_rows is not None:
            of_rows = self._batch_rows()
            assert of_rows.shape == (rows,) and of_rows.dtype == torch.int64 and of_rows.is_contiguous()
            batch_rows = of_rows.data_ptr()
        self._function(self._is_bf16, self._pointer, x.data_ptr(), x.stride(0), out.data_ptr(), rows, batch_rows)
        return out

    def extended(
        self, library: ctypes.CDLL, add: Any, context: int | None, batch_rows: Callable[[], torch.Tensor]
    ) -> CpuLinear:
        """Return this operation followed by `add`, which also runs within calls of whole layers.

        Args:
            add: an `ADD_TO_LINEAR`; must be batch-invariant.
            context: first argument of `add`.
            batch_rows: see the constructor; not used within calls of whole layers, which pass the rows themselves.
        """
        extension = _Extension(self._pointer, add, context)
        words = (_LONG * _LONGEST_FORMAT)()
        matrix = Matrix(EXTENDED, words, ctypes.addressof(extension), 0, None, *self._shape)
        return CpuLinear(library, matrix, self._dtype, (extension, self), batch_rows)


def concat_linear(library: ctypes.CDLL, linears: Sequence[Operation]) -> Operation:
    """See `kernels.concat_linear`; a single call if all operations are `CpuLinear`."""
    native = [linear for linear in linears if isinstance(linear, CpuLinear)]
    if len(native) < len(linears):
        return reference.concat_linear(linears)
    inner, dtype = native[0].matrix.inner, native[0].dtype
    assert all(linear.matrix.inner == inner and linear.dtype == dtype for linear in native)
    each = (Matrix * len(native))(*(linear.matrix for linear in native))
    words = (_LONG * _LONGEST_FORMAT)(len(native))
    outputs = sum(linear.matrix.outputs for linear in native)
    matrix = Matrix(CONCAT, words, ctypes.addressof(each), 0, None, outputs, inner)
    return CpuLinear(library, matrix, dtype, (each, native))
