"""Every native family in lower precision: in bfloat16 and float16 as near to float32 as Hugging Face's own model of
that type, in int8 the model whose matrices are rounded, in w8a8 near to it. Served by V2."""

import re
import shutil

import attrs
import pytest
import torch
from hf_oracle import assert_served_as_by, random_prompts, serve
from safetensors.torch import load_file, save_file
from tiny_families import IMAGE, VISION, bamba, decoder, deepseek, delta, gpt_oss, vision_language

from workerkit.components.layers import linear, weights
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.model import LoadedModel

DENSE = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3Text")
EXPERTS = ("Mixtral", "Qwen3Moe")
DELTAS = ("Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText")
MODELS = {
    **{name: (decoder, name) for name in (*DENSE, *EXPERTS)},
    "DeepseekV3": (deepseek,),
    **{name: (delta, name) for name in DELTAS},
    "Bamba": (bamba,),
    "GptOss": (gpt_oss,),
    "Qwen3VL": (vision_language, "Qwen3VL"),
}
# Matrices that stay in model.dtype: routers, of which a change sends tokens elsewhere; rates and decays of recurrences;
# DeepSeek's kv_b_proj, which is cut into matrices of each head; what a vision tower makes of pixels and positions.
KEPT = re.compile(
    r"\.(mlp|block_sparse_moe)\.(gate|router)\.|shared_expert_gate|in_proj_(ba|a|b)\.|kv_b_proj"
    r"|conv1d|pos_embed|patch_embed|_bias$"
)
# Times Hugging Face's error. Measured: 0.76 to 1.06 with native kernels, up to 1.22 with others.
FACTOR = 1.25
# Median errors of logits, of which these are the norm. Measured: int8 0.013 to 0.026, w8a8 0.018 to 0.040; where layers
# are recurrent in a random model, which amplify what is put into them, 0.06 to 0.10 and 0.09 to 0.12.
BOUNDS = {"int8": 0.04, "w8a8": 0.06}
RECURRENT_BOUNDS = {"int8": 0.15, "w8a8": 0.18}
COUNT = 4
PROMPTS = [[token % IMAGE for token in prompt] for prompt in random_prompts([1, 3, 90, 20, 64, 11, 40, 30])]
EXACT = ["cpu", "reference"]  # kernels that keep matrices in the size that they have


@attrs.frozen
class Family:
    """Hugging Face's model, and the folder that it is saved in."""

    name: str
    model: torch.nn.Module
    folder: object

    @property
    def bounds(self):
        return RECURRENT_BOUNDS if self.name in DELTAS else BOUNDS


@pytest.fixture(scope="module", params=MODELS)
def family(request, tmp_path_factory):
    make, *names = MODELS[request.param]
    model, folder = make(*names), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return Family(request.param, model, folder)


def in_dtype(model, folder, dtype):
    """(The model in float32, in dtype), their weights the same."""
    model.to(dtype).save_pretrained(folder)
    return [type(model).from_pretrained(folder, dtype=kept).eval() for kept in (torch.float32, dtype)]


def served_by(folder, kernels=None, **model):
    config = {
        "model": {"source": str(folder), "max_model_len": 128, **model},
        "limits": {"max_num_reqs": 8, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 200},
        "components": {"runner": "v2"} | ({"kernels": kernels} if kernels else {}),
    }
    return assemble(config)


def network_of(folder, **options):
    assembly = served_by(folder, **options)
    assembly.worker.init_device()
    assembly.worker.load_model()
    return assembly.value(LoadedModel)


@torch.no_grad()
def logits_of(model, served):
    """[N, V] float32 of the tokens that were served."""
    return torch.cat(
        [
            model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
            for prompt, (tokens, _) in zip(PROMPTS, served, strict=True)
        ]
    )


def median_error(got, exact):
    """Of rows, relative to their norm: where a rounding sends a token to another expert, that row says nothing."""
    return float(((got.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).median())


def error(model, served):
    return median_error(torch.cat([logits for _, logits in served]), logits_of(model, served))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_lower_type_costs_no_more_than_in_hugging_face(family, dtype, tmp_path):
    make, *names = MODELS[family.name]
    exact, theirs = in_dtype(make(*names), tmp_path, dtype)
    served = serve(served_by(tmp_path, dtype=str(dtype).removeprefix("torch.")), PROMPTS, COUNT)
    assert 0 < error(exact, served) <= FACTOR * median_error(logits_of(theirs, served), logits_of(exact, served))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@torch.inference_mode()
def test_pictures_in_a_lower_type_cost_no_more_than_in_hugging_face(dtype, tmp_path):
    exact, theirs = in_dtype(vision_language("Qwen3VL"), tmp_path, dtype)
    tower = network_of(tmp_path, dtype=str(dtype).removeprefix("torch.")).network.vision
    grids = [(1, 4, 6), (1, 14, 10), (3, 4, 2)]
    size = 3 * 2 * VISION["patch_size"] ** 2
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), size, generator=torch.Generator().manual_seed(2))
    pixels, output = pixels.to(dtype), tower.encode(pixels.to(dtype), grids)
    of_exact, of_theirs = (
        model.model.get_image_features(pixels.to(model.dtype), torch.tensor(grids), return_dict=True)
        for model in (exact, theirs)
    )
    for ours, one, other in zip(
        (output.embeds, *output.deepstack),
        *([torch.cat(level) for level in (f.pooler_output, *f.deepstack_features)] for f in (of_exact, of_theirs)),
        strict=True,
    ):
        assert 0 < median_error(ours, one) <= FACTOR * median_error(other, one)


def packed_matrices(family):
    """Name in the file -> what is packed, and the dimension of its inputs, over which rows have one scale."""
    tensors = load_file(family.folder / "model.safetensors")
    stacked = -2 if family.name == "GptOss" else -1
    return {
        name: (tensor, stacked if tensor.dim() == 3 else -1)
        for name, tensor in tensors.items()
        if tensor.dim() > 1 and not KEPT.search(name)
    }


def rounded(weight, dim):
    """To 8 bits; rows of zeros stay zero."""
    scale = (weight.abs().amax(dim, keepdim=True) / 127).clamp(min=1e-30)
    return (weight / scale).round() * scale


def test_int8_is_the_model_whose_matrices_are_rounded(family, tmp_path):
    tensors = load_file(family.folder / "model.safetensors")
    tensors |= {name: rounded(*matrix) for name, matrix in packed_matrices(family).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(family.folder / "config.json", tmp_path)
    model = type(family.model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    served = serve(served_by(family.folder, dtype="float32", quantization="int8"), PROMPTS, COUNT)
    assert_served_as_by(model, PROMPTS, served)
    assert 1e-3 < error(family.model, served) < family.bounds["int8"]


def test_w8a8_is_near(family, monkeypatch):
    def served():
        return serve(served_by(family.folder, dtype="float32", quantization="w8a8"), PROMPTS, COUNT)

    assert 1e-3 < error(family.model, served()) < family.bounds["w8a8"]

    def mistaken(pieces, device):
        codes, scales = weights.to_int8(pieces, device)
        return codes, scales.roll(1)

    monkeypatch.setattr(linear, "to_int8", mistaken)
    assert error(family.model, served()) > family.bounds["w8a8"]  # it would be noticed


@pytest.mark.parametrize("kind", ["int8", "w8a8"])
def test_a_packed_weight_takes_a_byte_and_each_row_a_scale(family, kind):
    plain, packed = (
        network_of(family.folder, dtype="float32", quantization=quantization, kernels=EXACT).weight_bytes
        for quantization in ("none", kind)
    )
    matrices = packed_matrices(family).values()
    num_weights = sum(tensor.numel() for tensor, _ in matrices)
    num_rows = sum(tensor.numel() // tensor.shape[dim] for tensor, dim in matrices)
    assert plain - packed == 3 * num_weights - 4 * num_rows


def test_keep_leaves_matrices_that_no_file_packs(family):
    """As they are."""
    networks = [network_of(family.folder, dtype="bfloat16", quantization=kind).network for kind in ("none", "keep")]
    for (_, one), (_, other) in zip(*(network.weights() for network in networks), strict=True):
        assert torch.equal(one, other)
