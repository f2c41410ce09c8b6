"""The memory of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from persample._torch.lookup import find, read


def get_storage_id(tensor: Tensor) -> int:
    """An id of the memory that a tensor and its views share."""
    return get_storage_key(tensor.untyped_storage())


def get_storage_key(storage: torch.UntypedStorage) -> int:
    """An id of a storage, as long as it or a weak reference to it exists."""
    return read(storage, "_cdata", "Every recording")


def get_address(storage: torch.UntypedStorage) -> int:
    """The address of a storage, 0 if it has no memory."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0


_count_owners: Callable[[int], int] = find("torch._C._storage_Use_Count", "Every recording")


def count_owners(storage: torch.UntypedStorage) -> int:
    """The number of tensors with this memory, and of other objects that keep it, besides `storage` itself."""
    return _count_owners(get_storage_key(storage)) - 1


def get_storage(ref: Any) -> torch.UntypedStorage | None:
    """The storage behind a `StorageWeakRef`, None if it was freed."""
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


# Whether a tensor is the wrapper of a transform of torch.func (vmap, grad, jvp, functionalize) around another tensor.
is_wrapped_by_transform: Callable[[Tensor], bool] = find(
    "torch._C._functorch.is_functorch_wrapped_tensor", "Every recording"
)


def find_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, None if it has none of its own (sparse tensors, wrappers of torch.func)."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return None if is_wrapped_by_transform(tensor) else storage


def find_storage_id(tensor: Tensor) -> int | None:
    """An id of the memory that a tensor and its views share, None if the tensor has no memory of its own (sparse)."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None


def is_foreign_memory(tensor: Tensor) -> bool:
    """Whether the memory of a tensor belongs to another library, such as numpy."""
    try:
        return not tensor.untyped_storage().resizable()
    except NotImplementedError:
        return False
