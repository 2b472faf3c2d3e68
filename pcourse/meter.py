"""Memory of one rank by category, to the byte: every live tensor storage, from its birth to its end.

A storage is *temporary* until something claims it: the model its parameters, autograd what it keeps for backward
(activations), a parameter its gradient, the optimizer its state. So an activation is exactly what autograd saved, each
storage once. On CPU the count is the same from run to run; on CUDA it is that of the same storages, and a
report's notes say what the allocator's own peak was. Not seen: workspace inside one operation, and what a
backend stages outside torch (gloo: up to the payload and more).

Enter the meter before the model is built, in the rank's own thread.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pcourse.report import CATEGORIES, MemoryLedger


class MemoryMeter(TorchDispatchMode):
    """`with MemoryMeter() as meter:` counts; `meter.ledger()` gives the peaks since `reset_peaks()`."""

    def __init__(self):
        super().__init__()
        self._live: dict[int, list] = {}  # storage -> [bytes, category, weak reference]
        self._gathered: set[int] = set()  # storages that come and go, whatever autograd keeps of them
        self._lock = threading.RLock()  # a storage may be freed in any thread
        self.bytes = dict.fromkeys(CATEGORIES, 0)
        self.reset_peaks()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # spares a torch._dynamo wrapper around every operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t is not torch.Tensor and hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a wrapper such as DTensor: count the tensors inside it
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return out

    def see(self, tensor: torch.Tensor, category: str | None = None) -> None:
        """Count `tensor`'s storage if it is new or resized; claim it for `category` if one is given."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        with self._lock:
            entry = self._live.get(key)
            if entry is None:
                entry = self._live[key] = [0, category or "temporary", None]
                entry[2] = weakref.ref(storage, lambda _: self._forget(key))
            if category is not None and category != entry[1]:
                self._add(entry[1], -entry[0])
                entry[1] = category
                self._add(category, entry[0])
            if nbytes != entry[0]:
                change, entry[0] = nbytes - entry[0], nbytes
                self._add(entry[1], change)

    def claim(self, category: str, tensors) -> None:
        for tensor in tensors:
            self.see(tensor, category)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Claim the optimizer's state as it comes to be."""
        optimizer.register_step_post_hook(lambda *_: self.claim("optimizer", optimizer_state(optimizer)))

    def keep(self, tensor: torch.Tensor) -> None:
        """`tensor` is kept for backward: an activation, if nothing else has claimed it."""
        key = tensor.untyped_storage()._cdata
        entry = self._live.get(key)
        if key not in self._gathered and (entry is None or entry[1] == "temporary"):
            self.see(tensor, "activations")

    def see_gathered(self, tensor: torch.Tensor) -> None:
        """`tensor` has been resized, and is temporary: gathered for use, soon to be freed."""
        self.see(tensor, "temporary")
        self._gathered.add(tensor.untyped_storage()._cdata)

    @contextmanager
    def saving(self):
        """Around a forward pass: what autograd keeps for backward is activations, if nothing else has claimed it.

        Under these hooks autograd does not check that a saved tensor was changed in place, so they belong to the
        memory pass alone.
        """

        def pack(tensor):
            self.keep(tensor)
            return tensor.detach()  # `tensor` itself would keep its own graph alive

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def reset_peaks(self) -> None:
        with self._lock:
            self._peaks = dict(self.bytes)
            self._at_peak = dict(self.bytes)

    def ledger(self) -> MemoryLedger:
        return MemoryLedger(**self._peaks, peak=sum(self._at_peak.values()), at_peak=dict(self._at_peak))

    def _add(self, category: str, change: int) -> None:
        self.bytes[category] += change
        self._peaks[category] = max(self._peaks[category], self.bytes[category])
        if change > 0 and sum(self.bytes.values()) > sum(self._at_peak.values()):
            self._at_peak = dict(self.bytes)

    def _forget(self, key: int) -> None:
        with self._lock:
            nbytes, category, _ = self._live.pop(key)
            self._gathered.discard(key)
            self._add(category, -nbytes)


def optimizer_state(optimizer: torch.optim.Optimizer):
    """The optimizer's tensors, step counters left out."""
    for state in optimizer.state.values():
        yield from (t for t in state.values() if isinstance(t, torch.Tensor) and t.dim() > 0)
