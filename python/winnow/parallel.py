"""Several ranks over a torch process group: gloo for the CPU or CUDA, nccl for CUDA.

``Communicator`` moves bytes for ``Plan(comm=..., spread=...)``, ``cut`` and ``combine``; winnow
does all arithmetic, so results have the same bits over every transport.
"""

from __future__ import annotations

import ctypes
import datetime
import inspect

import torch
import torch.distributed as dist

__all__ = ["Communicator"]


class _DeviceMemory:
    """Device memory at an address, as torch.as_tensor() takes it."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Communicator:
    """A group of ranks that moves bytes, over a torch process group.

    group     a process group of the backend gloo or nccl; None: the default group
    device    whose memory moves, "cpu" or "cuda". None: CUDA's over nccl, the host's over others.
              gloo takes both; it waits on the host, so what uses it is in no CUDA graph.
    deadline  seconds after which exchange() gives up and names the ranks that are missing. What the
              collectives wait for at most is the group's own timeout.

    After a failure the group is spent: every later call raises RuntimeError at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        deadline: float = 30.0,
        device: str | None = None,
    ):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.name = dist.get_backend(group)
        devices = ("cuda",) if self.name == "nccl" else ("cpu", "cuda")
        if device is not None and device not in devices:
            raise ValueError(f"device: expected {' or '.join(devices)}, found {device}")
        self.takes_cuda = (device or devices[0]) == "cuda"
        self.deadline = deadline
        # The name that replaces all_gather_into_tensor from torch 2.13 on.
        self._all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        parameters = list(inspect.signature(self._all_gather).parameters)
        self._out_first = parameters[0].startswith("output")

    def _view(self, address: int, nbytes: int) -> torch.Tensor:
        if self.takes_cuda:
            return torch.as_tensor(_DeviceMemory(address, nbytes), device="cuda")
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        """recv [size, nbytes]: block r is what rank r sent. Addresses of host or device memory."""
        if nbytes == 0:
            return
        out, own = self._view(recv, nbytes * self.size), self._view(send, nbytes)
        self._all_gather(*((out, own) if self._out_first else (own, out)), group=self.group)

    def all_to_all(self, send: int, recv: int, nbytes: int) -> None:
        """Block r of recv is block `rank` of what rank r sent."""
        if nbytes == 0:
            return
        out, own = self._view(recv, nbytes * self.size), self._view(send, nbytes * self.size)
        dist.all_to_all_single(out, own, group=self.group)

    def exchange(self, send: int, recv: int, nbytes: int) -> None:
        """all_gather of host memory, done on return."""
        own = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(send), dtype=torch.uint8)
        out = torch.frombuffer(
            (ctypes.c_uint8 * (nbytes * self.size)).from_address(recv), dtype=torch.uint8
        ).view(self.size, nbytes)
        if self.name == "nccl":
            gathered = torch.empty(self.size * nbytes, dtype=torch.uint8, device="cuda")
            mine = own.cuda()
            self._all_gather(
                *((gathered, mine) if self._out_first else (mine, gathered)), group=self.group
            )
            out.copy_(gathered.view(self.size, nbytes).cpu())
            return
        self._exchange_by_pairs(own.clone(), out)

    def _exchange_by_pairs(self, own: torch.Tensor, out: torch.Tensor) -> None:
        # From rank to rank, so that those who are missing are known. What is pending after a
        # failure keeps its own memory.
        came = [own.clone() for _ in range(self.size)]
        others = [r for r in range(self.size) if r != self.rank]
        names = {r: dist.get_global_rank(self.group, r) if self.group else r for r in others}
        received = {r: dist.irecv(came[r], names[r], group=self.group) for r in others}
        sent = [dist.isend(own, names[r], group=self.group) for r in others]
        wait = datetime.timedelta(seconds=self.deadline)
        missing = []
        for r, work in received.items():
            try:
                work.wait(wait)
            except RuntimeError:
                missing.append(r)
                wait = datetime.timedelta(milliseconds=100)  # of the deadline nothing is left
        if missing:
            ranks = ", ".join(f"rank {r}" for r in missing)
            raise RuntimeError(f"no answer from {ranks} within {self.deadline:g} s")
        for work in sent:
            work.wait(wait)
        for r in range(self.size):
            out[r].copy_(came[r] if r != self.rank else own)
