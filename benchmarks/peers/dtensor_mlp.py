"""PyTorch's DTensor: a tensor-parallel MLP block, and what one operator costs beside plain tensors.

    python dtensor_mlp.py --nproc 2
    python dtensor_mlp.py --nproc 2 --what operators

The block is down(gelu(up(x))) with hidden = 4 dim, up cut by rows, down by columns; the input is
replicated and so is the result. A whole block on plain tensors shows that both compute the same.

No operator of the second part communicates: activations are Shard(0), weights Replicate(), and
gradients that come out Partial are left so. Local shapes are those of the plain tensors.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from common import (
    common_arguments,
    emit,
    launch,
    loadavg,
    summary,
    time_interleaved,
    time_loop,
    uniform_f32,
)


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


def operators(dim):
    """name -> (function, names of the inputs it uses)."""
    return {
        "add": (lambda t: t["x"] + t["y"], ("x", "y")),
        "mul": (lambda t: t["x"] * t["y"], ("x", "y")),
        "relu": (lambda t: F.relu(t["x"]), ("x",)),
        "gelu": (lambda t: F.gelu(t["x"]), ("x",)),
        "softmax": (lambda t: F.softmax(t["x"], dim=-1), ("x",)),
        "matmul": (lambda t: t["x"] @ t["w"], ("x", "w")),
        "linear": (lambda t: F.linear(t["x"], t["w"], t["b"]), ("x", "w", "b")),
        "layer_norm": (lambda t: F.layer_norm(t["x"], (dim,), t["g"], t["b"]), ("x", "g", "b")),
        "view": (lambda t: t["x"].view(t["x"].size(0), dim // 4, 4), ("x",)),
        "sum": (lambda t: t["x"].sum(), ("x",)),
    }


def operands(rows, dim, mesh):
    """Tensors whose local x and y are rows x dim; plain ones without a mesh."""
    rows *= 1 if mesh is None else mesh.size()
    shapes = {"x": (rows, dim), "y": (rows, dim), "w": (dim, dim), "b": (dim,), "g": (dim,)}
    made = {}
    for name, shape in shapes.items():
        tensor = values(name, *shape)
        if mesh is not None:
            tensor = distribute_tensor(tensor, mesh, [Shard(0) if name in "xy" else Replicate()])
        made[name] = tensor.detach().requires_grad_(True)
    return made


def phases(function, inputs, leaves):
    """Phase -> call of one operator."""
    grad = torch.ones_like(function(inputs)).detach()

    def forward():
        with torch.no_grad():
            function(inputs)

    def forward_backward():
        torch.autograd.grad(function(inputs), leaves, grad)

    return {"forward": forward, "forward_backward": forward_backward}


def run_operators(rank, world, args, mesh):
    rows, dim = 16, 64
    costs = {"forward": [], "forward_backward": []}
    for function, used in operators(dim).values():
        calls = {}
        for label, where in (("plain", None), ("dtensor", mesh)):
            inputs = operands(rows, dim, where)
            calls[label] = phases(function, inputs, [inputs[name] for name in used])
        for phase, found in costs.items():
            samples = time_interleaved(
                {label: calls[label][phase] for label in calls}, 100, args.repeats)
            least = {label: min(s) * 1e6 for label, s in samples.items()}
            found.append(least["dtensor"] - least["plain"])
    if rank == 0:
        emit({"bench": "dtensor_operators", "rows": rows, "dim": dim, "nproc": world,
              "operators": list(operators(dim)),
              "overhead_us": {phase: [round(us, 2) for us in found]
                              for phase, found in costs.items()},
              "us": {phase: round(statistics.median(found), 2) for phase, found in costs.items()},
              "load": loadavg()}, args.out)


def run(rank, world, args):
    mesh = init_device_mesh("cpu", (world,))
    if args.what == "mlp":
        run_mlp(rank, world, args, mesh)
    else:
        run_operators(rank, world, args, mesh)


def run_mlp(rank, world, args, mesh):
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
    parser.add_argument("--what", choices=("mlp", "operators"), default="mlp")
    launch(run, parser.parse_args())


if __name__ == "__main__":
    main()
