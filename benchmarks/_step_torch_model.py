"""Qwen3-MoE in PyTorch alone, for the step benchmark: the model of `jax_megamoe.models.qwen3_moe`.

Parameters are float32 or, gathered by FSDP, bf16; activations are of the given dtype; norms,
rotations, softmax, routers and the loss compute in float32. Each layer is under an activation
checkpoint, and all of it but the exchange between ranks under torch.compile. On one rank a layer is
one compiled function; its experts are rows in the order of the experts, three grouped products and
gathers whose gradients are gathers. Over several ranks they are those of _torch_ranks.py.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from _shapes import Shape
from _step_torch_attention import Attend
from _torch_ranks import combine, make_layer, route, spread
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportMissingImports]

# x, cos, sin, ... -> the layer's result and the rows of each expert.
Layer = Callable[..., Any]
# Parameters of a layer by their shapes' names below, in the order in which functions take them.
ATTENTION = ("attention_norm", "query", "key", "value", "out", "query_norm", "key_norm")
ROUTER = ("mlp_norm", "router")
EXPERTS = ("w_gate", "w_up", "w_down")


class Block(nn.Module):
    """A layer. Matrices are [output, input], as those of nn.Linear, experts' [E, output, input]."""

    def __init__(self, config: Mapping[str, Any], num_ranks: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (_empty(config["hidden_size"]) for _ in range(2))
        H, I, D = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
        of_heads, of_groups = (config[f"num_{n}_heads"] * D for n in ("attention", "key_value"))
        self.query, self.out = _empty(of_heads, H), _empty(H, of_heads)
        self.key, self.value = _empty(of_groups, H), _empty(of_groups, H)
        self.query_norm, self.key_norm = _empty(D), _empty(D)
        self.router = _empty(config["num_experts"], H)
        self.experts = Experts(config["num_experts"] // num_ranks, H, I)

    def forward(self, layer: Layer, x: Any, *place_and_bias: Any) -> tuple[Any, Any]:
        """x [B, S, H]; what `place` returned, and float32 [E], the selection bias."""
        own = [getattr(self, name) for name in (*ATTENTION, *ROUTER)]
        run = functools.partial(layer, experts=self.experts)
        return checkpoint(
            run, x, *place_and_bias, *own, use_reentrant=False, preserve_rng_state=False
        )


class Experts(nn.Module):
    """Those of a rank: a module of its own, so that FSDP may split them over fewer ranks."""

    def __init__(self, num_experts: int, H: int, I: int) -> None:
        super().__init__()
        self.w_gate, self.w_up = (_empty(num_experts, I, H) for _ in range(2))
        self.w_down = _empty(num_experts, H, I)

    def forward(self, layer: Layer, *arrays: Any) -> Any:
        return layer(*arrays, *(getattr(self, name) for name in EXPERTS))


class Model(nn.Module):
    """Tokens to the sum of -log p(target): what `training.summed_loss` is."""

    def __init__(self, config: Mapping[str, Any], num_ranks: int, dtype: Any, chunk: int) -> None:
        """Of parameters that are not there yet (the device "meta").

        config: the fields of a `Qwen3MoeConfig` all of whose layers have experts, without biases.
        num_ranks: that share the experts. chunk: positions whose logits are made at a time.
        """
        super().__init__()
        self.config, self.dtype, self.chunk = config, dtype, chunk
        with torch.device("meta"):
            vocabulary = config["vocab_size"], config["hidden_size"]
            self.embedding = _empty(*vocabulary)
            layers = range(config["num_hidden_layers"])
            self.blocks = nn.ModuleList([Block(config, num_ranks) for _ in layers])
            self.norm = _empty(config["hidden_size"])
            if not config["tie_word_embeddings"]:
                self.head = _empty(*vocabulary)
        self.loss = torch.compile(functools.partial(_loss, config["rms_norm_eps"]), dynamic=False)

    def forward(self, layer: Layer, tokens: Any, targets: Any, bias: Any) -> tuple[Any, Any]:
        """tokens, targets: int64 [B, S]; bias: float32 [layers, E], of the routers' choices.

        Returns:
          float32 [], and int64 [layers, E], rows of each expert.
        """
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        places = place(self.config, tokens.shape[1], tokens.device)
        loads = []
        for block, of_layer in zip(self.blocks, bias.unbind(), strict=True):
            x, load = block(layer, x, *places, of_layer)
            loads.append(load)
        head = self.embedding if self.config["tie_word_embeddings"] else self.head
        rows = x.flatten(0, 1).split(self.chunk * len(tokens))
        parts = zip(rows, targets.flatten().split(self.chunk * len(tokens)), strict=True)
        how = {"use_reentrant": False, "preserve_rng_state": False}
        losses = [checkpoint(self.loss, *part, self.norm, head, **how) for part in parts]
        return torch.stack(losses).sum(), torch.stack(loads)


def make_layer_function(
    config: Mapping[str, Any], attend: Attend, num_tokens: int, num_ranks: int, group: Any
) -> Layer:
    """A layer of `Block`, as it calls it; num_tokens: of a rank; group: of the experts' ranks."""
    of_block = functools.partial(torch.compile, dynamic=False, fullgraph=True)
    before = functools.partial(attention_and_router, config, attend)
    if num_ranks == 1:
        compiled = of_block(functools.partial(_whole, before, config["num_experts"]))
        return lambda *arrays, experts: experts(compiled, *arrays)
    compiled, sizes = of_block(before), {"H": config["hidden_size"], "E": config["num_experts"]}
    sizes |= {"K": config["num_experts_per_tok"], "I": config["moe_intermediate_size"]}
    exchanged = make_layer(Shape("", T=num_tokens, R=num_ranks, **sizes), group=group)

    def layer(*arrays: Any, experts: Any) -> tuple[Any, Any]:
        x, h, ids, w, load = compiled(*arrays)

        def of_rank(*arrays: Any) -> Any:
            rows, weights = arrays[:3], arrays[3:]
            return exchanged(*rows, *(_transposed(a, h.dtype) for a in weights))

        return x + experts(of_rank, h, ids, w).view(x.shape), load

    return layer


def _whole(before: Callable[..., Any], num_experts: int, *arrays: Any) -> tuple[Any, Any]:
    """A layer on one rank; the last three arrays are the experts'."""
    x, h, ids, w, load = before(*arrays[:-3])
    gate, up, down = (_transposed(a, h.dtype) for a in arrays[-3:])
    order, inverse, counts = route(ids, num_experts)
    ends = counts.cumsum(0).to(torch.int32)
    rows = spread(h, order, inverse)
    activated = F.silu(torch._grouped_mm(rows, gate, offs=ends))
    activated = activated * torch._grouped_mm(rows, up, offs=ends)
    o = torch._grouped_mm(activated, down, offs=ends)
    return x + combine(o, order, inverse, w).view(x.shape), load


def attention_and_router(
    config: Mapping[str, Any], attend: Attend, *arrays: Any
) -> tuple[Any, ...]:
    """x behind the attention; what the experts get, [T, H]; ids, weights [T, K]; rows of each."""
    x, cos, sin, bias, *parameters = arrays
    of: dict[str, Any] = dict(zip((*ATTENTION, *ROUTER), parameters, strict=True))
    eps, D = config["rms_norm_eps"], config["head_dim"]
    h = _normalised(x, of["attention_norm"], eps)

    def heads(name: str) -> Any:
        return F.linear(h, of[name].to(h.dtype)).unflatten(-1, (-1, D)).transpose(1, 2)

    query, key = (
        _rotated(_normalised(heads(name), of[f"{name}_norm"], eps), cos, sin)
        for name in ("query", "key")
    )
    mixed = attend(query, key, heads("value"))
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), of["out"].to(x.dtype))
    h = _normalised(x, of["mlp_norm"], eps).flatten(0, 1)
    scores = F.linear(h.float(), of["router"].float()).softmax(-1)
    ids = (scores.detach() + bias).topk(config["num_experts_per_tok"], dim=-1).indices
    w = scores.gather(1, ids)
    if config["norm_topk_prob"]:
        w = w / w.sum(-1, keepdim=True)
    load = torch.zeros(len(bias), dtype=torch.int64, device=ids.device)
    load = load.scatter_add(0, ids.flatten(), torch.ones_like(ids).flatten())
    return x, h, ids, w, load


def place(config: Mapping[str, Any], seq: int, device: Any) -> tuple[Any, Any]:
    """cos and sin of each position's angles, float32 [S, D / 2]."""
    half = config["head_dim"] // 2
    rates = config["rope_theta"] ** (-torch.arange(half, device=device).float() / half)
    angles = torch.arange(seq, device=device).float()[:, None] * rates
    return angles.cos(), angles.sin()


def _loss(eps: float, x: Any, targets: Any, norm: Any, head: Any) -> Any:
    logits = F.linear(_normalised(x, norm, eps), head.to(x.dtype)).float()
    return F.cross_entropy(logits, targets, reduction="sum")


def _normalised(x: Any, scale: Any, eps: float) -> Any:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale.float()).to(x.dtype)


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def _transposed(weight: Any, dtype: Any) -> Any:
    """[E, output, input] as grouped_mm takes it: the inner dimension contiguous."""
    return weight.to(dtype).transpose(-2, -1)


def _empty(*shape: int) -> Any:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32))
