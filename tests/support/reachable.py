"""What an object keeps in memory."""

import gc
import types

import torch

_PASSED_OVER = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device)


def tensor_bytes(root):
    """Bytes of all tensors that can be reached from `root`, each storage once; classes and functions lead nowhere."""
    seen, todo, storages, opaque = set(), [root], {}, 0
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, _PASSED_OVER):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor) and value.is_mkldnn:  # oneDNN's own memory
            opaque += value.nbytes
        elif isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        todo.extend(gc.get_referents(value))
    return sum(storages.values()) + opaque
