"""How other code keeps the weights of a mixture-of-experts layer: layouts, by name.

A `Layout` says of each parameter of this package in which tensor it lies and how. It is always
chosen by the caller: where H = I no shape could tell a matrix from its transpose, nor gate from up.
`weights.py` reads and writes by them. `docs/weights.md` has a table of the published ones.
"""

import dataclasses

from jax_megamoe.validation import check_choice, check_flag, refuse

EXPERT = "{e}"
PARTS = ("whole", "first", "second", "even", "odd")
_OTHER_PART = {"first": "second", "second": "first", "even": "odd", "odd": "even"}

# The shape of each parameter in the letters of config.py, without the expert dimension of those
# that each expert has; S: intermediate size of all shared experts together.
OF_AN_EXPERT = {
    "w_gate": "HI",
    "w_up": "HI",
    "w_down": "IH",
    "b_gate": "I",
    "b_up": "I",
    "b_down": "H",
}
OF_THE_LAYER = {
    "router": "HE",
    "router_bias": "E",
    "selection_bias": "E",
    "shared_w_gate": "HS",
    "shared_w_up": "HS",
    "shared_w_down": "SH",
    "shared_router": "H1",
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a parameter lies, and how.

    Attributes:
      name: of the tensor, behind the prefix of its layer. With "{e}" in it each expert has a tensor
        of its own, numbered from 0; else a parameter of experts is one tensor [E, ...].
      transposed: the matrix is [output, input], as in a PyTorch Linear.
      part: of the outputs of the tensor, which this parameter is: "whole"; the "first" or "second"
        half; or those at "even" or "odd" places, counted from 0. Another parameter is the rest.
      flat: the experts lie below each other, [E rows, columns] in place of [E, rows, columns].
    """

    name: str
    _: dataclasses.KW_ONLY
    transposed: bool = False
    part: str = "whole"
    flat: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Of each parameter the tensor it lies in; None: it is not there.

    The parameters: `router` [H, E], `router_bias` and `selection_bias` [E], `w_gate` and `w_up`
    [E, H, I], `w_down` [E, I, H], as in the modules; biases of the experts' products, `b_gate` and
    `b_up` [E, I], `b_down` [E, H]; shared experts, `shared_w_gate` and `shared_w_up` [H, S],
    `shared_w_down` [S, H], `shared_router` [H, 1].

    Raises (when it is made):
      TypeError: a field that is no `Stored`, or one of its fields of another type.
      ValueError: a part of no name, a part whose rest is no parameter or lies otherwise, "{e}" in
        the name of what experts do not have, or with `flat`, or what a vector cannot be.
    """

    w_gate: Stored
    w_up: Stored
    w_down: Stored
    router: Stored | None = None
    router_bias: Stored | None = None
    selection_bias: Stored | None = None
    b_gate: Stored | None = None
    b_up: Stored | None = None
    b_down: Stored | None = None
    shared_w_gate: Stored | None = None
    shared_w_up: Stored | None = None
    shared_w_down: Stored | None = None
    shared_router: Stored | None = None

    def __post_init__(self) -> None:
        for parameter, stored in self.parameters().items():
            _check(parameter, stored)
            self._check_rest(parameter, stored)

    def parameters(self) -> dict[str, Stored]:
        """Those that are there, by name."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: stored for name, stored in fields if stored is not None}

    def _check_rest(self, parameter: str, stored: Stored) -> None:
        """A tensor holds one whole parameter, or two that together are all of it."""
        rest = [
            (other, there)
            for other, there in self.parameters().items()
            if there.name == stored.name and other != parameter
        ]
        if stored.part == "whole" and not rest:
            return
        wanted = dataclasses.replace(stored, part=_OTHER_PART.get(stored.part, "whole"))
        if stored.part == "whole" or [there for _, there in rest] != [wanted]:
            others = ", ".join(f"{other} as {there}" for other, there in rest) or "nothing else"
            may_be = "alone in its tensor" if stored.part == "whole" else f"with one as {wanted}"
            refuse(ValueError, parameter, f"{stored} with {others}", may_be)


def _check(parameter: str, stored: Stored) -> None:
    if not isinstance(stored, Stored):
        refuse(TypeError, parameter, f"a {type(stored).__name__}", "a Stored or None")
    if not isinstance(stored.name, str):
        refuse(TypeError, f"{parameter}.name", f"a {type(stored.name).__name__}", "a str")
    check_choice(f"{parameter}.part", stored.part, PARTS)
    for flag in ("transposed", "flat"):
        check_flag(f"{parameter}.{flag}", getattr(stored, flag))
    of_experts = parameter in OF_AN_EXPERT
    is_matrix = len((OF_AN_EXPERT | OF_THE_LAYER)[parameter]) == 2
    if EXPERT in stored.name and (stored.flat or not of_experts):
        why = "flat, one tensor holds all experts" if of_experts else "no parameter of an expert"
        refuse(ValueError, f"{parameter}.name", repr(stored.name), f"without {EXPERT}: {why}")
    if stored.flat and not of_experts:
        refuse(ValueError, f"{parameter}.flat", "True", "False: it is no parameter of an expert")
    if stored.transposed and not is_matrix:
        refuse(ValueError, f"{parameter}.transposed", "True", "False: it is a vector")


def _linear(name: str) -> Stored:
    """The weight of a PyTorch Linear of that name."""
    return Stored(f"{name}.weight", transposed=True)


# Qwen3-MoE, as published: prefix "model.layers.<n>.mlp.".
QWEN3_MOE = Layout(
    router=_linear("gate"),
    w_gate=_linear("experts.{e}.gate_proj"),
    w_up=_linear("experts.{e}.up_proj"),
    w_down=_linear("experts.{e}.down_proj"),
)

# Qwen2-MoE, likewise, with its gated shared expert.
QWEN2_MOE = dataclasses.replace(
    QWEN3_MOE,
    shared_w_gate=_linear("shared_expert.gate_proj"),
    shared_w_up=_linear("shared_expert.up_proj"),
    shared_w_down=_linear("shared_expert.down_proj"),
    shared_router=_linear("shared_expert_gate"),
)

# DeepSeek-V3, as published: prefix "model.layers.<n>.mlp.".
DEEPSEEK_V3 = dataclasses.replace(
    QWEN3_MOE,
    selection_bias=Stored("gate.e_score_correction_bias"),
    shared_w_gate=_linear("shared_experts.gate_proj"),
    shared_w_up=_linear("shared_experts.up_proj"),
    shared_w_down=_linear("shared_experts.down_proj"),
)

# Mixtral, as published: prefix "model.layers.<n>.block_sparse_moe.".
MIXTRAL = Layout(
    router=_linear("gate"),
    w_gate=_linear("experts.{e}.w1"),
    w_up=_linear("experts.{e}.w3"),
    w_down=_linear("experts.{e}.w2"),
)

# The experts of transformers 5 in memory, of Qwen3-MoE, Mixtral and others: [E, 2I, H], gate
# first, and [E, H, I].
TRANSFORMERS_STACKED = Layout(
    router=_linear("gate"),
    w_gate=Stored("experts.gate_up_proj", transposed=True, part="first"),
    w_up=Stored("experts.gate_up_proj", transposed=True, part="second"),
    w_down=Stored("experts.down_proj", transposed=True),
)

# gpt-oss, as in bf16 checkpoints of transformers: prefix "model.layers.<n>.mlp."; [E, H, 2I] with
# gate at even and up at odd columns, and [E, I, H].
GPT_OSS = Layout(
    router=_linear("router"),
    router_bias=Stored("router.bias"),
    w_gate=Stored("experts.gate_up_proj", part="even"),
    w_up=Stored("experts.gate_up_proj", part="odd"),
    w_down=Stored("experts.down_proj"),
    b_gate=Stored("experts.gate_up_proj_bias", part="even"),
    b_up=Stored("experts.gate_up_proj_bias", part="odd"),
    b_down=Stored("experts.down_proj_bias"),
)

# MaxText's routed experts, not fused, of one layer; a path's keys joined by "/".
MAXTEXT = Layout(
    router=Stored("gate/kernel"),
    w_gate=Stored("wi_0"),
    w_up=Stored("wi_1"),
    w_down=Stored("wo"),
)

# The gated experts of MegaBlocks: w1 and v1 [E I, H] multiply transposed, w2 [E I, H] as it is.
MEGABLOCKS = Layout(
    router=_linear("router.layer"),
    w_gate=Stored("experts.mlp.w1", transposed=True, flat=True),
    w_up=Stored("experts.mlp.v1", transposed=True, flat=True),
    w_down=Stored("experts.mlp.w2", flat=True),
)
