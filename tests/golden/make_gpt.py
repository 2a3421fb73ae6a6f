"""Writes gpt.json: losses and gradients of two tiny GPTs, computed by PyTorch in fp64.

The model is written here from its formulas in plain tensor operators and shares no code with the library. Weights and
tokens follow integer formulas, so that both sides start from equal bits. Run with torch 2.x:

    python tests/golden/make_gpt.py tests/golden/gpt.json
"""

import json
import math
import sys

import torch

CASES = [
    dict(name="grouped_untied", vocab_size=11, num_layers=2, dim=8, num_heads=4, num_kv_heads=2, hidden_dim=12,
         max_sequence=6, rope_theta=100.0, norm_eps=1e-5, tie_embeddings=False, batch=2, positions=5, left_out=[3]),
    dict(name="plain_tied", vocab_size=7, num_layers=1, dim=16, num_heads=2, num_kv_heads=2, hidden_dim=10,
         max_sequence=4, rope_theta=10000.0, norm_eps=1e-3, tie_embeddings=True, batch=1, positions=4, left_out=[]),
]


def shapes(c):
    d, hidden = c["dim"], c["hidden_dim"]
    kv = c["num_kv_heads"] * d // c["num_heads"]
    yield "embed.weight", (c["vocab_size"], d)
    for i in range(c["num_layers"]):
        block = f"blocks.{i}."
        yield block + "attn_norm.weight", (d,)
        yield block + "attn.wq.weight", (d, d)
        yield block + "attn.wk.weight", (kv, d)
        yield block + "attn.wv.weight", (kv, d)
        yield block + "attn.wo.weight", (d, d)
        yield block + "mlp_norm.weight", (d,)
        yield block + "mlp.w1.weight", (hidden, d)
        yield block + "mlp.w3.weight", (hidden, d)
        yield block + "mlp.w2.weight", (d, hidden)
    yield "norm.weight", (d,)
    if not c["tie_embeddings"]:
        yield "head.weight", (c["vocab_size"], d)


def weights(c):
    """Element e of parameter k: ((37 e + 11 k) mod 101 - 50) / 64, plus 1 for norms; exact in fp32."""
    result = {}
    for k, (name, shape) in enumerate(shapes(c)):
        values = [((37 * e + 11 * k) % 101 - 50) / 64 + ("norm" in name) for e in range(math.prod(shape))]
        result[name] = torch.tensor(values, dtype=torch.float64).view(shape).requires_grad_(True)
    return result


def rms(x, w, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w


def rotate(x, theta):
    """x [batch, heads, positions, head_dim]; pairs (i, i + half) as complex numbers times e^(i angle)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * theta ** (
        -torch.arange(half, dtype=torch.float64)[None, :] / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def attention(c, w, block, x):
    batch, positions, dim = x.shape
    heads, kv_heads = c["num_heads"], c["num_kv_heads"]
    split = lambda y, n: y.view(batch, positions, n, -1).transpose(1, 2)
    q = rotate(split(x @ w[block + "attn.wq.weight"].T, heads), c["rope_theta"])
    k = rotate(split(x @ w[block + "attn.wk.weight"].T, kv_heads), c["rope_theta"])
    v = split(x @ w[block + "attn.wv.weight"].T, kv_heads)
    k = torch.repeat_interleave(k, heads // kv_heads, 1)
    v = torch.repeat_interleave(v, heads // kv_heads, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(dim // heads)
    later = torch.ones(positions, positions, dtype=torch.bool).triu(1)
    mixed = torch.softmax(scores.masked_fill(later, -math.inf), -1) @ v
    return mixed.transpose(1, 2).reshape(batch, positions, dim) @ w[block + "attn.wo.weight"].T


def mlp(w, block, x):
    gate = x @ w[block + "mlp.w1.weight"].T
    return (gate * torch.sigmoid(gate) * (x @ w[block + "mlp.w3.weight"].T)) @ w[block + "mlp.w2.weight"].T


def run(c):
    w = weights(c)
    count = c["batch"] * c["positions"]
    tokens = torch.tensor([(5 * i + 3) % c["vocab_size"] for i in range(count)]).view(c["batch"], c["positions"])
    targets = torch.tensor([-100 if i in c["left_out"] else (3 * i + 1) % c["vocab_size"] for i in range(count)])
    x = w["embed.weight"][tokens]
    for i in range(c["num_layers"]):
        block = f"blocks.{i}."
        x = x + attention(c, w, block, rms(x, w[block + "attn_norm.weight"], c["norm_eps"]))
        x = x + mlp(w, block, rms(x, w[block + "mlp_norm.weight"], c["norm_eps"]))
    head = w["embed.weight" if c["tie_embeddings"] else "head.weight"]
    logits = (rms(x, w["norm.weight"], c["norm_eps"]) @ head.T).view(count, -1)
    kept = targets >= 0
    loss = -torch.log_softmax(logits, -1)[kept, targets[kept]].mean()
    loss.backward()
    return dict(config=c, loss=loss.item(), logits=logits.flatten().tolist(), tokens=tokens.flatten().tolist(),
                targets=targets.tolist(), gradients={n: p.grad.flatten().tolist() for n, p in w.items()})


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        json.dump([run(case) for case in CASES], file, separators=(",", ":"))
        file.write("\n")
