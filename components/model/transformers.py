"""Any causal language model of transformers whose attention can be replaced, over our paged cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from workerkit.components.model.transformers_attention import NAME, handing_over, register
from workerkit.framework.errors import ModelError, UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import (
    LoadedModel,
    Model,
    ModelConfig,
    ModelInputs,
    ModelLoader,
    ModelOutput,
    Network,
    QuantizedTensor,
)
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.interfaces.store import ModelStore

# What an attention layer may tell its function: what we serve, what is said elsewhere, and what asks for other results.
_SERVED = frozenset(("scaling", "sliding_window", "softcap", "s_aux", "is_causal"))
_SAID_ELSEWHERE = frozenset(("position_ids", "output_attentions"))
_LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary embeddings that depend on the longest request of a batch


class TransformersModel(Model):
    """A model whose network is transformers' own. `from_pretrained` reads the weights, from safetensors only; no code
    of a checkpoint is run."""

    def __init__(
        self,
        section: ModelSection,
        context: DeviceContext,
        loader: ModelLoader,
        files: ModelStore,
        attention: AttentionBackend,
        kernels: Kernels,
    ) -> None:
        self._section = section
        self._context = context
        self._loader = loader
        self._files = files
        self._attention = attention
        self._kernels = kernels

    def load(self) -> LoadedModel:
        if self._section.quantization.uses - {"none"}:
            raise UnsupportedError("model.quantization: `model: transformers` keeps weights in model.dtype")
        config = self._loader.read_config()
        layers = self._probe(config)
        self._kernels.prepare(self._context)
        self._attention.prepare(layers, self._context.dtype)
        network = TransformersNetwork(config, self._read(), layers)
        weight_bytes = sum(tensor.nbytes for _, tensor in network.weights())
        return LoadedModel(network=network, config=config, weight_bytes=weight_bytes)

    def reload_weights(self, loaded: LoadedModel) -> None:
        loaded.network.load_weights(TransformersNetwork(loaded.config, self._read(), ()).weights())

    def _probe(self, config: ModelConfig) -> tuple[AttentionLayer, ...]:
        """The attention layers of the model, found by running one token through it without weights."""
        import transformers

        register()
        hf_config = transformers.AutoConfig.from_pretrained(self._folder(), trust_remote_code=False)
        _check_rope(hf_config)
        _check_kinds(hf_config)
        try:
            with torch.device("meta"):
                factory: Any = transformers.AutoModelForCausalLM  # partly typed
                # the experts' default function knows no float32 on this device
                model = factory.from_config(
                    hf_config, attn_implementation=NAME, experts_implementation="batched_mm"
                ).eval()
        except Exception as error:  # families name their classes of attention, or ask for packages, in their own ways
            what = f"its attention cannot be replaced ({type(error).__name__}: {error})"
            raise _refusal(config, [what]) from error
        return probe(model, config, hf_config.get_text_config())

    def _read(self) -> Any:
        import transformers

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self._folder(),
            dtype=self._context.dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            trust_remote_code=False,
        )
        model.to(self._context.device).eval().requires_grad_(False)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()  # memory of our own: that was the file, mapped
        return model

    def _folder(self) -> str:
        return str(self._files.resolve(self._section.source))


def _check_rope(hf_config: Any) -> None:
    rope = getattr(hf_config.get_text_config(), "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if found := kinds & set(_LENGTH_DEPENDENT):
        raise UnsupportedError(
            f"rope_type {', '.join(sorted(found))}: transformers computes it from the longest request of a batch"
        )


def _check_kinds(hf_config: Any) -> None:
    """No mask is made for our attention function, so what only a mask says must be known here."""
    kinds = set(getattr(hf_config.get_text_config(), "layer_types", None) or ())
    if found := kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"layers of kind {', '.join(sorted(found))} cannot run over the paged cache")


def probe(model: Any, config: ModelConfig, text_config: Any) -> tuple[AttentionLayer, ...]:
    """Run one token through a model on the meta device. Raises ModelError for what the paged cache does not serve."""
    layers: list[AttentionLayer] = []
    names = {id(module): name for name, module in model.named_modules()}
    problems: dict[str, None] = {}

    def note(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keywords: dict[str, Any]
    ) -> torch.Tensor:
        name, sinks = names[id(module)], keywords.get("s_aux")
        for keyword, given in keywords.items():
            if keyword not in _SERVED | _SAID_ELSEWHERE and (isinstance(given, torch.Tensor) or given):
                problems[f"{name} asks for {keyword}"] = None
        if key.shape != value.shape or (sinks is not None and sinks.shape != query.shape[1:2]):
            problems[f"{name}: keys and values, or heads and sinks, are not as many"] = None
        if keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            problems[f"{name} is not causal"] = None
        layers.append(
            AttentionLayer(
                name=name,
                index=len(layers),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[2],
                scale=float(keywords["scaling"]),
                sliding_window=keywords.get("sliding_window"),
                has_sinks=sinks is not None,
                softcap=keywords.get("softcap"),
            )
        )
        return torch.empty_like(query)

    ids, positions = (torch.zeros(1, 1, dtype=torch.long, device="meta") for _ in range(2))
    reading = _Reading(positions)
    try:
        with torch.no_grad(), handing_over(note), reading:
            model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    except Exception as error:  # whatever the code of a model of any family stumbles over
        problems[f"it cannot be run without weights and masks ({type(error).__name__}: {error})"] = None
    else:
        if not reading.found:
            problems["it does not read the positions that it is given"] = None
    kinds = getattr(text_config, "layer_types", None) or ["sliding_attention"] * len(layers)
    if getattr(text_config, "sliding_window", None) is not None and not problems:
        for layer, kind in zip(layers, kinds, strict=False):
            if kind == "sliding_attention" and layer.sliding_window is None:
                problems[f"{layer.name} leaves its sliding window to a mask"] = None
    if not problems and len({layer.name for layer in layers}) < len(layers):
        problems["its layers do not each call the attention function once"] = None
    if not layers:  # attention with biases that no argument holds, as of ALiBi, is such
        problems["its layers make scores by themselves: none calls transformers' attention function"] = None
    elif not problems and len(layers) < config.num_hidden_layers:
        problems[f"{config.num_hidden_layers - len(layers)} of its layers keep a state of another kind"] = None
    if problems:
        raise _refusal(config, problems)
    return tuple(layers)


def _refusal(config: ModelConfig, problems: Iterable[str]) -> ModelError:
    return ModelError("\n  - ".join([f"{config.architecture} cannot run over the paged cache:", *problems]))


class _Reading(TorchFunctionMode):
    """Whether anything is computed from a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self.found = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_attribute = getattr(func, "__name__", "") == "__get__"  # its shape, its device
        self.found |= not is_attribute and any(x is self._tensor for x in (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


class _Given(torch.nn.Module):
    """In the place of a model's body: the hidden states that it is given."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor | None = None, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> _Given:
        """Where some models have their body."""
        return self


class TransformersNetwork(Network):
    """All requests of a step are one row of tokens to the model: only attention knows them apart."""

    def __init__(self, config: ModelConfig, model: Any, layers: tuple[AttentionLayer, ...]) -> None:
        self.config = config
        self._model = model
        self._layers = layers
        self._layer_of = {id(model.get_submodule(layer.name)): layer for layer in layers}
        # The model's own forward makes logits of hidden states, whatever it does there (scales, caps).
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, model.base_model_prefix: _Given()}

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self._layers

    @property
    def tap_points(self) -> tuple[str, ...]:
        return ()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._model.get_input_embeddings()(input_ids.long())
        return rows

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        def attend(
            module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, more: dict[str, Any]
        ) -> torch.Tensor:
            return inputs.attend(self._layer_of[id(module)], query, key, value, more.get("s_aux"))

        tokens: dict[str, torch.Tensor] = (
            {"input_ids": inputs.input_ids[None].long()}
            if inputs.inputs_embeds is None
            else {"inputs_embeds": inputs.inputs_embeds[None]}
        )
        with handing_over(attend):
            output = self._model.base_model(**tokens, position_ids=inputs.positions[None], use_cache=False)
        return ModelOutput(hidden=output.last_hidden_state[0])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedTensor]]) -> None:
        own = dict(self.weights())
        for name, tensor in weights:
            assert isinstance(tensor, torch.Tensor)
            own[name].copy_(tensor)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
