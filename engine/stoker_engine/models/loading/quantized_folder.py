"""A quantized checkpoint as a `WeightSource` in which each matrix has one name, whatever tensors it is stored in.

in the files      q_proj.qweight  q_proj.scales  q_proj.qzeros  q_proj.g_idx       q_norm.weight
here              q_proj.weight, in blocks       q_proj.columns (from g_idx)         q_norm.weight
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.models.loading.safetensors_folder import SafetensorsFolder
from stoker_engine.models.loading.weight_source import Part, check_shape
from stoker_engine.quant.checkpoints.module import StoredModule
from stoker_engine.quant.weight_target import WeightTarget


class QuantizedFolder:
    """Source of quantized matrices in blocks, and of all other tensors unchanged.

    Args:
        plain: all tensors of the folder.
        modules: quantized matrices by module name.

    Raises:
        WeightsError: a matrix is stored both quantized and unquantized.
    """

    def __init__(self, plain: SafetensorsFolder, modules: Mapping[str, StoredModule]) -> None:
        self._plain = plain
        self._matrices = {_tensor_name(name, module): module for name, module in modules.items()}
        orders = {name: module for name, module in modules.items() if module.format.in_order_of == "groups"}
        self._columns = {f"{name}.columns": module for name, module in orders.items()}
        parts = {tensor for module in modules.values() for tensor in module.tensors}
        self._names = [name for name in plain.names() if name not in parts]
        if doubled := sorted({*self._matrices, *self._columns} & set(self._names)):
            raise WeightsError(f"the weights contain {doubled[0]} twice: quantized and unquantized")

    def names(self) -> list[str]:
        """See `WeightSource`."""
        return [*self._matrices, *self._columns, *self._names]

    def shape(self, name: str) -> torch.Size:
        """See `WeightSource`."""
        if name in self._columns:
            return self._columns[name].shape[-1:]
        return self._matrices[name].shape if name in self._matrices else self._plain.shape(name)

    def stored(self, name: str) -> StoredFormat | None:
        """See `WeightSource`."""
        return self._matrices[name].format if name in self._matrices else None

    def read(self, name: str, part: Part | None = None, stored: StoredFormat | None = None) -> torch.Tensor:
        """See `WeightSource`."""
        if name not in self._matrices:
            return self._plain.read(name, part)
        module = self._matrices[name]
        whole = tuple(slice(0, size) for size in module.shape)
        if stored is not None:
            assert stored == module.format
            return module.rows(whole if part is None else part)
        columns = module.columns()
        if part is None or columns is None:
            part = whole if part is None else part
            numbers = dequantize(module.rows(part), module.format, part[-1].stop - part[-1].start, torch.float32)
            return numbers if columns is None else torch.empty_like(numbers).index_copy_(-1, columns, numbers)
        return self.read(name)[part]

    def read_into(self, name: str, target: WeightTarget) -> None:
        """See `WeightSource`."""
        check_shape(name, self.shape(name), target)
        if name in self._columns:
            columns = self._columns[name].columns()
            assert columns is not None
            target.tensor.copy_(columns)
        else:
            target.tensor.copy_(self.read(name, target.shard, target.stored))


def _tensor_name(name: str, module: StoredModule) -> str:
    """Return the name of a module's matrix: ``{name}.weight``; for a stack of experts without this tensor
    ``{name}_blocks`` (MXFP4) or `name`."""
    weight, blocks = f"{name}.weight", f"{name}_blocks"
    if len(module.shape) == 2 or weight in module.tensors:
        return weight
    return blocks if blocks in module.tensors else name
