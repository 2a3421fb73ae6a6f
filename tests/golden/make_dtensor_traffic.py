"""Writes dtensor_traffic.json: elements that PyTorch's DTensor sends for every pair of layouts.

Runs DTensor.redistribute over the fake process group as each rank in turn and counts its collectives, padding
included, in the way of layout/redistribution.h: what the busiest rank sends in a direct exchange. Of its greedy plan,
its graph search, and both with a flattened mesh, the cheapest counts. null: DTensor refuses the pair. Run with torch
2.13:

    python tests/golden/make_dtensor_traffic.py tests/golden/dtensor_traffic.json
"""

import itertools
import json
import logging
import math
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

CASES = [((4,), (12, 8)), ((3,), (7, 5)), ((2, 2), (12, 8)), ((2, 2), (7, 5)), ((3, 2), (7, 5))]
PLACEMENTS = {
    "Replicate": Replicate(),
    "Shard(0)": Shard(0),
    "Shard(1)": Shard(1),
    "Partial(sum)": Partial("sum"),
    "Partial(avg)": Partial("avg"),
    "Partial(max)": Partial("max"),
    "Partial(min)": Partial("min"),
}


class Counter(TorchDispatchMode):
    """Sums what this rank sends."""

    def __init__(self):
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "c10d" in name and not any(part in name for part in ("wait_tensor", "_wrap_tensor")):
            numel = args[0].numel()
            if "all_gather_into_tensor" in name:
                self.sent += numel * (args[1] - 1)
            elif "reduce_scatter_tensor" in name:
                self.sent += numel * (args[2] - 1) // args[2]
            elif "all_reduce" in name:
                size = dist.distributed_c10d._resolve_process_group(args[2]).size()
                self.sent += math.ceil(2 * (size - 1) * numel / size)
            else:
                raise RuntimeError(f"uncounted collective {name}")
        return func(*args, **(kwargs or {}))


COUNTER = None


def all_to_all(tensor, gather_dim, shard_dim, mesh, mesh_dim):
    """Stands in for the one that falls back to a gather on CPUs: counts an all-to-all."""
    size = mesh.size(mesh_dim)
    COUNTER.sent += tensor.numel() * (size - 1) // size
    shape = list(tensor.shape)
    shape[gather_dim] *= size
    shape[shard_dim] //= size
    return tensor.new_zeros(shape)


def sent(mesh, shape, source, target, graph):
    global COUNTER
    local_shape, _ = compute_local_shape_and_global_offset(shape, mesh, source)
    stride = torch.empty(shape, device="meta").stride()
    _redistribute._gen_transform_infos.cache_clear()
    COUNTER = Counter()
    try:
        tensor = DTensor.from_local(torch.zeros(local_shape), mesh, source, run_check=False, shape=torch.Size(shape),
                                    stride=stride)
        with _redistribute.use_min_cost_redistribution_plan(graph), COUNTER:
            tensor.redistribute(mesh, target)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError) as error:
        if "uncounted" in str(error):
            raise
        return None
    return COUNTER.sent


def busiest(mesh_sizes, shape):
    """{(source, target): elements or None}, the maximum over ranks of the best plan."""
    pairs = list(itertools.product(itertools.product(PLACEMENTS, repeat=len(mesh_sizes)), repeat=2))
    world = math.prod(mesh_sizes)
    plans = {(flat, graph): {} for flat in ((False, True) if len(mesh_sizes) > 1 else (False,))
             for graph in (False, True)}
    for rank, (flat, graph) in itertools.product(range(world), plans):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        mesh = init_device_mesh("cpu", mesh_sizes, mesh_dim_names=tuple("ab"[: len(mesh_sizes)]))
        if flat:
            mesh._flatten("ab")
        for source, target in pairs:
            moved = sent(mesh, shape, [PLACEMENTS[p] for p in source], [PLACEMENTS[p] for p in target], graph)
            known = plans[flat, graph].setdefault((source, target), 0)
            plans[flat, graph][source, target] = None if moved is None or known is None else max(known, moved)
        dist.destroy_process_group()
    best = {}
    for pair in pairs:
        found = [plan[pair] for plan in plans.values() if plan[pair] is not None]
        best[pair] = min(found) if found else None
    return best


def main():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    placement_types.shard_dim_alltoall = all_to_all
    cases = []
    for mesh_sizes, shape in CASES:
        best = busiest(mesh_sizes, shape)
        layouts = list(itertools.product(PLACEMENTS, repeat=len(mesh_sizes)))
        # Row by source, column by target, in the order of the product of placements.
        cases.append(dict(mesh=mesh_sizes, shape=shape,
                          sent=[[best[source, target] for target in layouts] for source in layouts]))
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write(f'{{"torch": "{torch.__version__}", "placements": {json.dumps(list(PLACEMENTS))}, "cases": [\n')
        for i, case in enumerate(cases):
            file.write(f'{{"mesh": {json.dumps(case["mesh"])}, "shape": {json.dumps(case["shape"])}, "sent": [\n')
            file.write(",\n".join(json.dumps(row, separators=(",", ":")) for row in case["sent"]))
            file.write("]}" + ("," if i + 1 < len(cases) else "") + "\n")
        file.write("]}\n")


if __name__ == "__main__":
    main()
