"""A tensor-parallel MLP block with PyTorch's DTensor: forward and backward, beside plain tensors.

    python dtensor_mlp.py --nproc 2

The block is down(gelu(up(x))) with hidden = 4 dim, up cut by rows, down by columns; the input is
replicated and so is the result. Plain tensors do the same with two all-reduces by hand, to show
that both compute the same.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from common import common_arguments, emit, launch, loadavg, summary, time_loop, uniform_f32


def values(name, *shape):
    count = 1
    for size in shape:
        count *= size
    return torch.from_numpy(uniform_f32(name, 1, count, -3)).view(*shape)


def settle(tensor):
    """The tensor, with its pending collective (if any) waited for."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(values("up", 4 * dim, dim))
            self.down.weight.copy_(values("down", dim, 4 * dim))

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def step_of(module, x, grad):
    def step():
        for parameter in module.parameters():
            parameter.grad = None
        x.grad = None
        y = module(x)
        y.backward(grad)
        x.grad = settle(x.grad)
        return y

    return step


def run(rank, world, args):
    mesh = init_device_mesh("cpu", (world,))
    for dim in args.dims:
        x = values("tokens", args.tokens, dim).requires_grad_(True)
        grad = torch.ones(args.tokens, dim)
        whole = step_of(MLP(dim), x, grad)
        sharded = step_of(parallelize_module(
            MLP(dim), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}), x, grad)
        expected, expected_gradient = whole().detach(), x.grad
        found = settle(sharded()).detach()
        difference = max((found - expected).abs().max().item(),
                         (x.grad - expected_gradient).abs().max().item())
        dist.barrier()
        samples = time_loop(sharded, max(20, 25600 // dim), args.repeats)
        if rank == 0:
            emit({"bench": "dtensor_mlp", "tokens": args.tokens, "dim": dim, "nproc": world,
                  "us": summary([s * 1e6 for s in samples], 1), "max_abs_difference": difference,
                  "load": loadavg()}, args.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_arguments(parser, nproc=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--repeats", type=int, default=9)
    launch(run, parser.parse_args())


if __name__ == "__main__":
    main()
