"""Tiny random vision models of Hugging Face, with everything that a folder of one holds; and pictures for them."""

import io
import json

import numpy as np
import torch
from hf_oracle import perturb
from PIL import Image

IMAGE, START, END = 124, 126, 127
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_interleaved": True}
VISION = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
FAMILIES = {
    "Qwen3VL": ({"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}, {"deepstack_visual_indexes": [0, 2]}),
    "Qwen3_5": ({**DELTA, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}, {}),
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64, "longest_edge": 1600},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<start><image><end>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def make_model(family):
    """Hugging Face's model."""
    import transformers

    text, vision = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(
        text_config=TEXT | text,
        vision_config=VISION | vision,
        image_token_id=IMAGE,
        video_token_id=125,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    perturb(model)
    return model


def save(model, folder):
    """With a processor's config, a chat template, and a tokenizer to which token 17 is the word w17."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    names = {START: "<start>", END: "<end>", IMAGE: "<image>"}
    vocabulary = {names.get(number, f"\u2581w{number}"): number for number in range(TEXT["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\u2581w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "\u2581w0", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def picture(width, height, seed=0):
    """The file of a random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def next_logits(model, ids, tokens, pixels, grids):
    """[tokens, V] of Hugging Face's model: for each of the tokens that followed `ids`, in which there are as many
    placeholders as the pictures take."""
    whole = torch.tensor([[*ids, *tokens]])
    vision = {}
    if grids:
        vision = {
            "pixel_values": torch.from_numpy(np.concatenate(pixels)),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (whole == IMAGE).int(),
        }
    with torch.no_grad():
        return model(whole, **vision).logits[0, len(ids) - 1 : len(ids) - 1 + max(len(tokens), 1)]
