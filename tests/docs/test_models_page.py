"""docs/models.md names what is registered: every architecture, and the options of pictures and adapters."""

from pathlib import Path

import attrs

from workerkit.components.loader.gguf_architectures import ARCHITECTURES
from workerkit.components.lora import peft_file
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.plugins import load_plugins

TEXT = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text("utf-8")


def test_every_architecture_is_on_the_page():
    assert [name for name in (*NativeLibrary.builders, *ARCHITECTURES) if f"`{name}`" not in TEXT] == []


def test_options_of_pictures_and_adapters_are_on_the_page():
    registry = load_plugins().registry
    parts = (("lora", "peft"), ("encoder", "vision"), ("encoder_graph", "token_budget"), ("image_processor", "patches"))
    options = [field.name for part in parts for field in attrs.fields(registry.entry(*part).config)]
    assert len(options) > 8
    assert [name for name in options if name not in TEXT] == []


def test_fields_that_adapters_are_refused_for_are_read():
    named = ("bias", "modules_to_save", "alpha_pattern", "fan_in_fan_out", "layer_replication", "target_parameters")
    assert [name for name in named if f"`{name}`" not in TEXT or name not in peft_file._PLAIN] == []
