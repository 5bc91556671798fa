"""The static choices of one call and the dimensions it works on.

One dimension key serves the whole project, in annotations, comments and error messages:

    T  tokens per rank          K  choices per token       E  experts, over all ranks
    R  expert-parallel ranks    H  hidden size             I  intermediate size of one expert
    P  pool rows of a rank      B  expert blocks of the summation tree
"""

import dataclasses

PRECISIONS = ("bf16", "float32", "fp8_block")
# Those that the CUDA kernels have.
KERNEL_PRECISIONS = ("bf16", "fp8_block")
ACTIVATIONS = ("swiglu", "geglu")
BACKENDS = ("auto", "cuda", "reference")
SAVES = ("none", "gate_up")
COMBINE_DTYPES = ("float32", "bfloat16")
SCORES = ("softmax", "sigmoid")
SCORED = ("all", "chosen")
RANK_COUNTS = (1, 2, 4, 8)
BLOCK_COUNTS = (8, 4, 2, 1)
# Pool rows of an expert start at a multiple of this and are padded to the next one.
TILE_ROWS = 128
MAX_CHOICES = 32
MAX_EXPERTS = 512
INT32_MAX = 2**31 - 1
# The rows that a rank's pool has room for, as a multiple of those of even routing.
POOL_FACTOR = 2.0
# How long a kernel waits for the work of another block or rank: a peer may still be compiling.
WAIT_DEADLINE_S = 600.0
# Pool rows and slots are int32 in the kernels; the pads of MAX_EXPERTS experts must fit too.
MAX_SLOTS = INT32_MAX - MAX_EXPERTS * TILE_ROWS
# H and I of the CUDA kernels.
KERNEL_MULTIPLE = 64
# Columns, and of weights rows too, that share a scale in precision "fp8_block".
FP8_GROUP = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """gpt-oss's activation: g' sigmoid(alpha g') (u' + 1), with g' = min(g, limit) and u' = u
    within -limit and limit. Where a clamp holds, no gradient passes it.

    Attributes:
      alpha: finite in bf16; 1.702 makes g sigmoid(alpha g) an approximation of gelu.
      limit: likewise, positive.
    """

    alpha: float = 1.702
    limit: float = 7.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MegaMoEConfig:
    """The static choices of one call; hashable, so that it can key a compilation.

    Attributes:
      precision: "bf16" rounds operands and intermediates where the bf16 kernels do and accumulates
        in float32; "float32" rounds nowhere and exists in the reference backend only. "fp8_block"
        multiplies with the weights in FP8, rows in groups of 128 and weights in blocks of 128 x 128
        with power-of-two scales (docs/fp8.md); the rest, weight gradients too, is as in "bf16". H
        and I are multiples of 128 then. Its kernels take "swiglu" and no biases; for all else it
        exists in the reference backend only.
      activation: h of g = x Wg and u = x Wu, biases included. "swiglu": silu(g) u. "geglu":
        gelu(g) u, in gelu's tanh form, as `jax.nn.gelu` by default. Or a `ClampedSwiGLU`.
      backend: "cuda" (the kernels), "reference" (pure JAX, any platform) or "auto": the kernels in
        a program that is lowered for CUDA, where `reason_for_reference` finds none, and else the
        reference.
      save: what the forward keeps for the backward beside its inputs. "none": nothing, g and u are
        computed again. "gate_up": both, [P, 2I] of each rank, bf16 as the backward
        rounds them, so that gradients are the same bits (float32 with precision="float32"). Under
        `jax.checkpoint` it is kept where the policy saves the name "megamoe_gate_up", which is
        `jax_megamoe.ops.GATE_UP_NAME`.
      combine_dtype: in what each rank sends its experts' sum of a token, in y and in dx. "float32":
        as it is, so that no result depends on R. "bfloat16": rounded, half the bytes over NVLink;
        the same bits in every run, but others for each R. Where s_r is the sum of rank r, that
        changes sum_r s_r, before its own rounding, by at most 2^-8 sum_r |s_r|: by half a unit of
        the last place of the result where all s_r have one sign, by more than the whole result
        where they cancel; by nothing where one rank has all routes of the token. All other
        gradients stay as they are, and nothing changes for R = 1.
      pool_factor: how much memory a rank has for rows of the tokens of R ranks: so many times the
        T K rows that even routing gives it, 2 by default, finite and at least 1, or what any
        routing needs where that is less. A rank that gets more works them off in several passes, to
        the same y, dx and dw; weight gradients are then added up over the passes in float32, and
        may be rounded otherwise. No effect with R = 1, nor in the reference backend.
      trainable_experts: False does no weight-gradient work; weights and biases get zero gradients.
      return_counts: True also returns the number of rows of each local expert, int32 [E/R].
      debug_checks: True raises at run time for an expert id that is neither -1 nor in [0, E).
    """

    precision: str = "bf16"
    activation: str | ClampedSwiGLU = "swiglu"
    backend: str = "auto"
    save: str = "none"
    combine_dtype: str = "float32"
    pool_factor: float = POOL_FACTOR
    trainable_experts: bool = True
    return_counts: bool = False
    debug_checks: bool = False


def lacking_in_fp8(
    *, activation: str | ClampedSwiGLU = "swiglu", expert_bias: bool = False
) -> list[str]:
    """What of a call the kernels of precision "fp8_block" do not have; [] for nothing."""
    lacking = {
        f"activation {activation!r}": activation != "swiglu",
        "biases": expert_bias,
    }
    return [what for what, holds in lacking.items() if holds]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The static choices of a router; hashable. `presets.py` has those of published models.

    Attributes:
      scores: what makes a score of a logit: "softmax", or "sigmoid" of each logit by itself.
      scored: "all": every expert is scored, and the K highest scores are chosen. "chosen": the K
        highest logits are chosen, and these alone are scored. With "sigmoid" both give the same
        scores; they differ in what a selection bias is added to and what groups are compared by.
      renormalize: divide the weights of a token by their sum + 1e-20, as DeepSeek-V3 does; the
        summand keeps weights that are all 0 at 0, and is lost beside any sum that a softmax gives.
      scale: factor of the weights, behind renormalisation.
      num_groups: contiguous groups that the experts form, E / num_groups of each.
      num_chosen_groups: a token's experts come from that many groups, those with the highest sums
        of their two highest scores.
      selection_bias: the choice, of groups too, is made by score + bias, with a bias of each
        expert; weights and losses know nothing of it.
      linear_bias: the linear map that makes the logits has a bias, a parameter of the modules;
        `route` begins with the logits and does not look at it.
    """

    scores: str = "softmax"
    scored: str = "all"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    selection_bias: bool = False
    linear_bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dims:
    """The sizes of one call as one rank sees it; the letters are the dimension key above.

    pool_factor is that of `MegaMoEConfig`.
    """

    T: int
    K: int
    E: int
    R: int
    H: int
    I: int  # noqa: E741 - the dimension key of the project
    pool_factor: float = POOL_FACTOR

    @property
    def experts_per_rank(self) -> int:
        return self.E // self.R

    @property
    def pool_routes(self) -> int:
        """Routes that the pool has room for, whatever experts of the rank they go to.

        Those of one token of each rank at least, since a pass takes no less.
        """
        of_call, of_tokens = self.R * self.T * self.K, self.R * self.K
        wanted = int(min(self.pool_factor, self.R) * self.T * self.K)
        return min(of_call, max(of_tokens, wanted))

    @property
    def pool_rows(self) -> int:
        """P: rows for `pool_routes`, at most 127 more for each expert of the rank."""
        return self._rows_of(self.pool_routes)

    @property
    def most_rows(self) -> int:
        """Rows for all routes of all ranks on this one: at most R T K + 127 E/R."""
        return self._rows_of(self.R * self.T * self.K)

    @property
    def max_passes(self) -> int:
        """Passes of a call whose rows do not fit the pool at once.

        A pass takes as many tokens of each rank as always fit.
        """
        tokens = self.pool_routes // (self.R * self.K)
        return max(1, -(-self.T // max(1, tokens)))

    def _rows_of(self, routes: int) -> int:
        """The most rows of so many routes: every expert's last tile holds one row."""
        experts = self.experts_per_rank
        tiles = routes if routes < experts else experts + (routes - experts) // TILE_ROWS
        return tiles * TILE_ROWS

    @property
    def num_blocks(self) -> int:
        """B: how many fixed contiguous expert blocks the summation tree has.

        It depends on E alone, so that the tree is the same for every number of ranks.
        """
        return next(b for b in BLOCK_COUNTS if self.E % b == 0)

    @property
    def experts_per_block(self) -> int:
        return self.E // self.num_blocks
