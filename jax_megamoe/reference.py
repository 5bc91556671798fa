"""The contract in pure JAX: differentiable, on any platform, exact to the summation order.

The code follows the kernels' own structure, so that a reader can compare them line by line:
expert-contiguous pool rows in tiles of TILE_ROWS, one expert per tile; every product of a tile has
the same shape whatever R is, so a row's result does not depend on the number of ranks. Tokens are
gathered from all ranks at the start, and a rank's float32 partial sums are exchanged at the end.

The order of summation (the contract):
  * a token's routes to experts of one block are added in float32 in choice order, from 0;
  * the B block sums of a token are added by a fixed balanced binary tree, of which a rank holds a
    whole subtree; the root is rounded once to the dtype of the result;
  * dW, and likewise the gradient of a bias, adds whole tiles in float32, rows ordered by
    (source rank, token, choice).
Hence y, dx and dW are bitwise equal for every R that splits the same global batch.

Roundings of precision="bf16" (none in precision="float32"): x, dy and the weights on entry; h and o
in the forward; g, u, d(g, u), w h and the rows of dx in the backward; y and dx at the root. Biases
are not: they are added to float32 products, before g, u and o are rounded. With
combine_dtype="bfloat16" and several ranks also each rank's sum of a token, in both passes, which
depends on how many ranks there are.

Of precision="fp8_block" the same, except that products with the weights take the numbers that FP8
codes stand for (`quantization`): weights as given in FP8, and of x, h, dy, dg and du what rounding
by groups of 128 leaves, h from float32, the others from what is rounded to bf16 already. Weight
gradients, router gradients and those of biases take what they take in "bf16".
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_megamoe._recipe import recipe_of, to_bf16
from jax_megamoe.activation import gated, gated_unit, gated_with_gradients
from jax_megamoe.config import TILE_ROWS, Dims, MegaMoEConfig
from jax_megamoe.quantization import QuantizedExperts, dequantize

Array = jax.Array


class _Rows(NamedTuple):
    """Where each route of the gathered tokens lies; N = R T tokens, S = N K slots, L = E/R."""

    counts: Array  # int32 [L] rows of each local expert
    first: Array  # int32 [L] position of an expert's first row in `order`
    tile_end: Array  # int32 [L] tiles up to and including those of an expert
    order: Array  # int32 [S] slots sorted by (local expert, source rank, token, choice)
    slot_row: Array  # int32 [S] pool row of a slot; 0 for a slot that is not local
    slot_block: Array  # int32 [S] local block of a slot; -1 for a slot that is not local


class _Experts(NamedTuple):
    """What the experts of this rank are made of, in float32; biases None: there are none."""

    w_gate: Array  # [L, H, I]
    w_up: Array  # [L, H, I]
    w_down: Array  # [L, I, H]
    b_gate: Array | None  # [L, I]
    b_up: Array | None  # [L, I]
    b_down: Array | None  # [L, H]


class _Tile(NamedTuple):
    """TILE_ROWS consecutive pool rows of one expert."""

    expert: Array  # int32 [] local expert
    slot: Array  # int32 [TILE_ROWS]; 0 for a pad
    is_row: Array  # bool [TILE_ROWS, 1]; False for a pad


def forward(
    x: Array,
    expert_idx: Array,
    expert_weight: Array,
    *experts: Array,
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: str | None,
    quantized: QuantizedExperts | None = None,
    keep_gate_up: bool = False,
) -> tuple[Array, ...]:
    """The layer's output and the load of this rank's experts.

    Args:
      x: [T, H] bf16 or float32.
      expert_idx: int32 [T, K]; an id outside [0, E) is no route.
      expert_weight: [T, K] bf16 or float32.
      experts: w_gate, w_up [E/R, H, I] and w_down [E/R, I, H], bf16 or float32; then, with biases,
        b_gate, b_up [E/R, I] and b_down [E/R, H], bf16 or float32.
      quantized: the weights of precision="fp8_block", which takes no others; of the two orders of
        the codes the natural one is read.

    Returns:
      y [T, H] in the dtype of x, and the rows of each local expert, int32 [E/R]; with keep_gate_up
      also g beside u of every pool row, [P, 2I], as `backward` rounds them: bf16, or float32 with
      precision="float32".
    """
    recipe = recipe_of(config.precision)
    xs, ids, ws = (
        _gather(a, axis_name) for a in (recipe.stored(_f32(x)), expert_idx, _f32(expert_weight))
    )
    of = _experts(experts, quantized, config)
    rows, unit = _arrange(ids, dims, axis_name), gated_unit(config.activation)

    def tile(i: Array, carry: list[Array]) -> list[Array]:
        pool, *gate_up = carry
        t = _tile(rows, i)
        g, u = _gate_up(recipe.operand(_take(xs, t, dims.K)), of, t.expert)
        h = recipe.operand(gated(unit, g, u))
        o = recipe.stored(_plus(_dot(h, of.w_down[t.expert]), of.b_down, t.expert))
        pool = _put_rows(pool, i, _slot_weight(ws, t) * o)
        return [pool, *(_put_gate_up(a, i, g, u) for a in gate_up)]

    carry = [_zeros_like_vma((dims.most_rows, dims.H), xs)]
    if keep_gate_up:
        carry.append(_gate_up_pool(dims, config, xs))
    pool, *gate_up = lax.fori_loop(0, rows.tile_end[-1], tile, carry)
    y = recipe.stored(_combine(pool, rows, dims, config, axis_name))
    return y.astype(x.dtype), rows.counts, *gate_up


def backward(
    dy: Array,
    x: Array,
    expert_idx: Array,
    expert_weight: Array,
    *experts: Array,
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: str | None,
    quantized: QuantizedExperts | None = None,
    gate_up: Array | None = None,
) -> tuple[Array, ...]:
    """The gradients, from the inputs alone or also from what `forward` kept of the same inputs.

    Args: as `forward`; dy: [T, H].
      gate_up: [P, 2I] of `forward`; None: g and u are computed again.

    Returns:
      dx [T, H] in the dtype of x, d(expert_weight) float32 [T, K] and, if config.trainable_experts,
      the gradient of each of `experts`, float32: this rank's sums over the tokens of all R ranks.
    """
    recipe = recipe_of(config.precision)
    dys, xs, ids, ws = (
        _gather(a, axis_name)
        for a in (recipe.stored(_f32(dy)), recipe.stored(_f32(x)), expert_idx, _f32(expert_weight))
    )
    of = _experts(experts, quantized, config)
    rows, unit = _arrange(ids, dims, axis_name), gated_unit(config.activation)

    # Computed again in a loop of its own: so what follows is one program, and gives the same bits.
    pool = _recompute(xs, rows, of, dims, config) if gate_up is None else gate_up

    def tile(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        dx_pool, dw_pool, *d_experts = carry
        t = _tile(rows, i)
        x_rows, dy_rows, w = _take(xs, t, dims.K), _take(dys, t, dims.K), _slot_weight(ws, t)
        g, u = jnp.split(_f32(_tile_rows(pool, i)), 2, axis=1)
        dh = _dot(recipe.operand(dy_rows), of.w_down[t.expert], transpose_b=True)
        h, dg, du = gated_with_gradients(unit, g, u, w * dh)
        dw = jnp.sum(h * dh, axis=1, keepdims=True)
        if of.b_down is not None:
            dw += jnp.sum(dy_rows * of.b_down[t.expert][None], axis=1, keepdims=True)
        dg, du = recipe.stored(dg), recipe.stored(du)
        dx = _dot(recipe.operand(dg), of.w_gate[t.expert], transpose_b=True)
        dx += _dot(recipe.operand(du), of.w_up[t.expert], transpose_b=True)
        if d_experts:
            dg, du, wh = (jnp.where(t.is_row, a, 0) for a in (dg, du, recipe.stored(w * h)))
            terms = [_dot_t(x_rows, dg), _dot_t(x_rows, du), _dot_t(wh, dy_rows)]
            if of.b_down is not None:
                terms += [jnp.sum(a, axis=0) for a in (dg, du, w * dy_rows)]
            d_experts = [a.at[t.expert].add(term) for a, term in zip(d_experts, terms, strict=True)]
        dx_pool = _put_rows(dx_pool, i, recipe.stored(dx))
        return (dx_pool, _put_rows(dw_pool, i, dw), *d_experts)

    trained = experts if config.trainable_experts else ()
    shapes = [(dims.most_rows, dims.H), (dims.most_rows, 1), *(a.shape for a in trained)]
    carry = tuple(_zeros_like_vma(shape, xs) for shape in shapes)
    dx_pool, dw_pool, *d_experts = lax.fori_loop(0, rows.tile_end[-1], tile, carry)
    dx = recipe.stored(_combine(dx_pool, rows, dims, config, axis_name))
    dw = jnp.where(rows.slot_block >= 0, dw_pool[rows.slot_row, 0], 0)
    dw = _exchange(dw.reshape(dims.R, dims.T, dims.K), axis_name)
    return dx.astype(x.dtype), dw, *d_experts


def _experts(
    experts: tuple[Array, ...], quantized: QuantizedExperts | None, config: MegaMoEConfig
) -> _Experts:
    """The experts of a call, as products and sums take them."""
    stored, biases = recipe_of(config.precision).stored, tuple(map(_f32, experts[3:]))
    if quantized is None:
        weights = [stored(_f32(w)) for w in experts[:3]]
    else:
        weights = map(dequantize, quantized)
    return _Experts(*weights, *(biases or (None,) * 3))


def _gate_up(x_rows: Array, of: _Experts, expert: Array) -> tuple[Array, Array]:
    """g and u of the rows of a tile, as a product takes them, float32 [TILE_ROWS, I]."""
    g = _plus(_dot(x_rows, of.w_gate[expert]), of.b_gate, expert)
    return g, _plus(_dot(x_rows, of.w_up[expert]), of.b_up, expert)


def _plus(product: Array, bias: Array | None, expert: Array) -> Array:
    return product if bias is None else product + bias[expert][None]


def _recompute(xs: Array, rows: _Rows, of: _Experts, dims: Dims, config: MegaMoEConfig) -> Array:
    """g beside u of every pool row, [P, 2I], as `forward` keeps them."""
    operand = recipe_of(config.precision).operand

    def tile(i: Array, pool: Array) -> Array:
        t = _tile(rows, i)
        return _put_gate_up(pool, i, *_gate_up(operand(_take(xs, t, dims.K)), of, t.expert))

    return lax.fori_loop(0, rows.tile_end[-1], tile, _gate_up_pool(dims, config, xs))


def _f32(a: Array) -> Array:
    return jnp.asarray(a, jnp.float32)


def _dot(a: Array, b: Array, transpose_b: bool = False) -> Array:
    """a [M, D] times b [D, N], or b [N, D] transposed; float32 in and out."""
    return lax.dot_general(
        a, b, (((1,), (1 if transpose_b else 0,)), ((), ())), precision=lax.Precision.HIGHEST
    )


def _dot_t(a: Array, b: Array) -> Array:
    """a [M, D] transposed times b [M, N]; float32 in and out."""
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)


def _zeros_like_vma(
    shape: tuple[int, ...], like: Array, dtype: jax.typing.DTypeLike = jnp.float32
) -> Array:
    """Zeros that vary over the same mesh axes as `like`."""
    zeros = jnp.zeros(shape, dtype)
    axes = tuple(sorted(jax.typeof(like).mat.varying))
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def _gather(a: Array, axis_name: str | None) -> Array:
    """[T, ...] of every rank, in rank order: [R T, ...]."""
    return a if axis_name is None else lax.all_gather(a, axis_name, tiled=True)


def _arrange(expert_idx: Array, dims: Dims, axis_name: str | None) -> _Rows:
    """Pool rows of all routes that are local to this rank. expert_idx: int32 [R T, K]."""
    num_local = dims.experts_per_rank
    rank = jnp.int32(0) if axis_name is None else lax.axis_index(axis_name)
    local = expert_idx.reshape(-1) - rank * num_local
    in_range = (expert_idx.reshape(-1) >= 0) & (expert_idx.reshape(-1) < dims.E)
    local = jnp.where(in_range & (local >= 0) & (local < num_local), local, num_local)
    order = jnp.argsort(local, stable=True).astype(jnp.int32)
    counts = jnp.bincount(local, length=num_local + 1)[:-1].astype(jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    tile_end = jnp.cumsum(-(-counts // TILE_ROWS), dtype=jnp.int32)
    tile_begin = tile_end - -(-counts // TILE_ROWS)
    first = ends - counts
    position = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    is_local = local < num_local
    expert = jnp.where(is_local, local, 0)
    row = position - first[expert] + tile_begin[expert] * TILE_ROWS
    return _Rows(
        counts=counts,
        first=first,
        tile_end=tile_end,
        order=order,
        slot_row=jnp.where(is_local, row, 0),
        slot_block=jnp.where(is_local, expert // dims.experts_per_block, -1),
    )


def _tile(rows: _Rows, i: Array) -> _Tile:
    """The i-th tile; i < tile_end[-1]."""
    expert = jnp.searchsorted(rows.tile_end, i, side="right").astype(jnp.int32)
    num_tiles = -(-rows.counts[expert] // TILE_ROWS)
    row = (i - rows.tile_end[expert] + num_tiles) * TILE_ROWS
    row = row + jnp.arange(TILE_ROWS, dtype=jnp.int32)
    is_row = row < rows.counts[expert]
    slot = rows.order[jnp.where(is_row, rows.first[expert] + row, 0)]
    return _Tile(expert, jnp.where(is_row, slot, 0), is_row[:, None])


def _take(tokens: Array, tile: _Tile, num_choices: int) -> Array:
    """The token of each row of a tile, [TILE_ROWS, H]; 0 in pads, whatever token 0 holds."""
    return jnp.where(tile.is_row, tokens[tile.slot // num_choices], 0)


def _slot_weight(expert_weight: Array, tile: _Tile) -> Array:
    """The router weight of each row, [TILE_ROWS, 1]; 0 in pads."""
    return jnp.where(tile.is_row, expert_weight.reshape(-1, 1)[tile.slot], 0)


def _put_rows(pool: Array, i: Array, tile_rows: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(pool, tile_rows, i * TILE_ROWS, axis=0)


def _gate_up_pool(dims: Dims, config: MegaMoEConfig, like: Array) -> Array:
    """An empty pool of g beside u, [P, 2I], in the dtype to which the backward rounds them."""
    dtype = recipe_of(config.precision).gate_up_dtype
    return _zeros_like_vma((dims.most_rows, 2 * dims.I), like, dtype)


def _put_gate_up(pool: Array, i: Array, g: Array, u: Array) -> Array:
    return _put_rows(pool, i, jnp.concatenate([g, u], axis=1).astype(pool.dtype))


def _tile_rows(pool: Array, i: Array) -> Array:
    return lax.dynamic_slice_in_dim(pool, i * TILE_ROWS, TILE_ROWS, axis=0)


def _combine(
    pool: Array, rows: _Rows, dims: Dims, config: MegaMoEConfig, axis_name: str | None
) -> Array:
    """Each token's rows summed in the contract's order: [P, H] -> float32 [T, H]."""
    num_tokens, num_blocks = dims.R * dims.T, dims.num_blocks // dims.R
    slot_row = rows.slot_row.reshape(num_tokens, dims.K)
    slot_block = rows.slot_block.reshape(num_tokens, dims.K)
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)

    def add_choice(k: Array, sums: Array) -> Array:
        chosen = slot_block[:, k, None] == blocks[None]
        return sums + jnp.where(chosen[:, :, None], pool[slot_row[:, k], None, :], 0)

    sums = _zeros_like_vma((num_tokens, num_blocks, dims.H), pool)
    sums = lax.fori_loop(0, dims.K, add_choice, sums)
    root = _tree_sum([sums[:, b] for b in range(num_blocks)])
    if dims.R > 1 and config.combine_dtype == "bfloat16":
        root = to_bf16(root)
    return _exchange(root.reshape(dims.R, dims.T, dims.H), axis_name)


def _exchange(partial: Array, axis_name: str | None) -> Array:
    """Sends each rank its tokens' partial sums and adds them by the tree: [R, T, ...] -> [T, ...].

    An all_to_all and not psum_scatter, whose order of summation is not the contract's.
    """
    if axis_name is not None:
        partial = lax.all_to_all(partial, axis_name, split_axis=0, concat_axis=0)
    return _tree_sum(list(partial))


def _tree_sum(terms: list[Array]) -> Array:
    """Balanced binary tree over a power of two of terms: ((0 + 1) + (2 + 3)) + ..."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[0::2], terms[1::2], strict=True)]
    return terms[0]
