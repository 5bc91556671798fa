"""What the Qwen3-MoE of `transformers` makes of small random checkpoints, for the tests.

    python tests/golden/make_qwen3_golden.py [--out PATH] [--checkpoints FOLDER]

Needs torch and transformers, CPU builds suffice, and nothing of this project but
`qwen3_tensors.py`, which draws the checkpoints: any Python that has them will do. The file holds,
for each case, the config that transformers wrote of it, the logits of each token, and what the
router of each layer with experts chose; and a small file of the safetensors library, byte by byte.
`tests/qwen3_golden.py` reads it. With --checkpoints each case is read from the folder of its name
there, as something else wrote it.
"""

# pyright: reportMissingImports=false

import argparse
import json
import pathlib
import platform
import tempfile
from typing import Any

import numpy as np
import qwen3_tensors
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

PATH = pathlib.Path(__file__).with_name("qwen3.npz")
# The last chosen expert and the first that was not lie further apart, in logits, than float32 sums
# differ between libraries.
LEAST_GAP = 1e-4


def versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def write_checkpoint(name: str, folder: pathlib.Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(qwen3_tensors.CASES[name]))
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(qwen3_tensors.tensors(name), path, metadata={"format": "pt"})


def run(name: str, folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config of a case as transformers writes it, and its arrays.

    Returns:
      logits [B, S, V], and of the layers with experts, by order, expert_idx [layers, B, S, K] and
      expert_weight, as the router orders them.
    """
    model, info = transformers.Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    tokens, is_real = qwen3_tensors.batch(name)
    routed = []
    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.register_forward_hook(lambda module, given, made: routed.append(made))
    with torch.no_grad():
        ids, mask = torch.from_numpy(tokens).long(), torch.from_numpy(is_real).long()
        logits = model.eval()(input_ids=ids, attention_mask=mask).logits
    num_choices = model.config.num_experts_per_tok
    for router_logits, _, _ in routed:
        ranked = router_logits.sort(dim=-1, descending=True)[0][:, : num_choices + 1]
        clear = (ranked[:, :-1] - ranked[:, 1:]).min(dim=-1)[0].numpy() > LEAST_GAP
        assert clear[is_real.reshape(-1)].all(), name
    shape = (len(routed), *tokens.shape, num_choices)
    arrays = {
        "logits": logits.numpy(),
        "expert_idx": np.stack([i.numpy() for _, _, i in routed]).reshape(shape).astype(np.int32),
        "expert_weight": np.stack([w.numpy() for _, w, _ in routed]).reshape(shape),
    }
    return json.loads(model.config.to_json_string()), arrays


def safetensors_file() -> np.ndarray:
    """uint8: a file of several dtypes and shapes, one of them of no element."""
    numbers = torch.arange(6, dtype=torch.float32)
    named = {
        "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "bf16": numbers.reshape(2, 3).bfloat16() / 7,
        "f32": numbers / 7,
        "scalar": torch.tensor(5, dtype=torch.int64),
        "nothing": torch.zeros(0, 4),
    }
    return np.frombuffer(safetensors.torch.save(named), np.uint8)


def make(checkpoints: pathlib.Path | None) -> dict[str, np.ndarray]:
    """All of the file: "case/array" of each, and `about`, JSON of versions and configs."""
    configs, arrays = {}, {"safetensors": safetensors_file()}
    with tempfile.TemporaryDirectory() as temporary:
        for name in qwen3_tensors.CASES:
            folder = (checkpoints or pathlib.Path(temporary)) / name
            if checkpoints is None:
                write_checkpoint(name, folder)
            configs[name], made = run(name, folder)
            arrays |= {f"{name}/{key}": value for key, value in made.items()}
    about = json.dumps({"versions": versions(), "configs": configs})
    return {"about": np.array(about), **arrays}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes what transformers' Qwen3-MoE computes.")
    parser.add_argument("--out", type=pathlib.Path, default=PATH, help="(beside this script)")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="a folder with each case's")
    arguments = parser.parse_args()
    made = make(arguments.checkpoints)
    with arguments.out.open("wb") as file:
        np.savez_compressed(file, **made)  # pyright: ignore[reportArgumentType]
    print(f"{arguments.out.name}: {arguments.out.stat().st_size} bytes, {versions()}")


if __name__ == "__main__":
    main()
