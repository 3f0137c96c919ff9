"""Any causal language model of transformers whose attention can be replaced, over our paged cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from workerkit.components.model.transformers_attention import (
    ALIBI_DIMS,
    NAME,
    TORCH,
    read_slopes,
    register,
    run,
    with_alibi,
)
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
from workerkit.framework.interfaces.sections import CacheSection, ModelSection
from workerkit.framework.interfaces.store import ModelStore

# What an attention layer may tell its function: what we serve, what is said elsewhere, and what asks for other results.
_SERVED = frozenset(("scaling", "sliding_window", "softcap", "s_aux", "is_causal", "mask"))
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
        cache: CacheSection,
    ) -> None:
        self._section = section
        self._context = context
        self._loader = loader
        self._files = files
        self._attention = attention
        self._kernels = kernels
        self._cache = cache
        self._implementation = NAME  # of attention, until the model's family is known

    def load(self) -> LoadedModel:
        if self._section.quantization.uses - {"none"}:
            raise UnsupportedError("model.quantization: `model: transformers` keeps weights in model.dtype")
        config = self._loader.read_config()
        layers = self._probe(config)
        self._kernels.prepare(self._context)
        self._attention.prepare(layers, self._context.dtype)
        network = TransformersNetwork(config, self._read(), layers, self._implementation)
        for layer in network.alibi_layers:
            if self._cache.quantization.of(layer) != "none":
                raise UnsupportedError(
                    f"cache.quantization: {layer.name} keeps positions in its keys, for ALiBi: right would be none"
                )
        weight_bytes = sum(tensor.nbytes for _, tensor in network.weights())
        return LoadedModel(network=network, config=config, weight_bytes=weight_bytes)

    def reload_weights(self, loaded: LoadedModel) -> None:
        loaded.network.load_weights(TransformersNetwork(loaded.config, self._read(), (), NAME).weights())

    def _probe(self, config: ModelConfig) -> tuple[AttentionLayer, ...]:
        """The attention layers of the model, found by running tokens through it without weights."""
        import transformers

        register()
        hf_config = transformers.AutoConfig.from_pretrained(self._folder(), trust_remote_code=False)
        _check_rope(hf_config)
        _check_kinds(hf_config)
        factory: Any = transformers.AutoModelForCausalLM  # partly typed
        reasons: list[str] = []
        for self._implementation in (NAME, TORCH):
            try:
                with torch.device("meta"):
                    # the experts' default function knows no float32 on this device
                    model = factory.from_config(
                        copy.deepcopy(hf_config),
                        attn_implementation=self._implementation,
                        experts_implementation="batched_mm",
                    )
            except Exception as error:  # families refuse an implementation, or ask for packages, in their own ways
                reasons.append(f"its attention cannot be replaced ({type(error).__name__}: {error})")
            else:
                return probe(model.eval(), config, hf_config.get_text_config(), self._implementation)
        raise _refusal(config, reasons[:1])

    def _read(self) -> Any:
        import transformers

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self._folder(),
            dtype=self._context.dtype,
            attn_implementation=self._implementation,
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


def probe(model: Any, config: ModelConfig, text_config: Any, implementation: str = NAME) -> tuple[AttentionLayer, ...]:
    """Run two tokens through a model on the meta device. Raises ModelError for what the paged cache does not serve."""
    layers: list[AttentionLayer] = []
    names = {id(module): name for name, module in model.named_modules()}
    problems: dict[str, None] = {}

    def note(
        module: torch.nn.Module | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keywords: dict[str, Any],
    ) -> torch.Tensor:
        name = f"attention.{len(layers)}" if module is None else names[id(module)]
        sinks, mask = keywords.get("s_aux"), keywords.get("mask")
        has_biases = mask is not None and mask.dtype != torch.bool
        for keyword, given in keywords.items():
            if keyword not in _SERVED | _SAID_ELSEWHERE and (isinstance(given, torch.Tensor) or given):
                problems[f"{name} asks for {keyword}"] = None
        if key.shape[:2] != value.shape[:2] or (sinks is not None and sinks.shape != query.shape[1:2]):
            problems[f"{name}: keys and values, or heads and sinks, are not as many"] = None
        if keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            problems[f"{name} is not causal"] = None
        layers.append(
            AttentionLayer(
                name=name,
                index=len(layers),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                # values are as wide as keys to the cache: zeros fill up what is not
                head_dim=max(query.shape[2] + ALIBI_DIMS * has_biases, value.shape[2]),
                scale=float(keywords["scaling"]),
                sliding_window=keywords.get("sliding_window"),
                has_sinks=sinks is not None,
                softcap=keywords.get("softcap"),
            )
        )
        return query.new_empty(*query.shape[:2], value.shape[2])

    ids, positions = (torch.zeros(1, 2, dtype=torch.long, device="meta") for _ in range(2))
    reading = _Reading(positions)
    try:
        with torch.no_grad(), reading:
            run(model, {"input_ids": ids}, positions, note, implementation)
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
        for argument in () if is_attribute else (*args, *(kwargs or {}).values()):
            parts = (
                argument if isinstance(argument, tuple | list) else (argument,)
            )  # such as an index of two dimensions
            self.found |= any(part is self._tensor for part in parts)
        return func(*args, **(kwargs or {}))


class _Output:
    """What a body returns: hidden states, and None for all else that a head may look for."""

    def __init__(self, hidden: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(torch.nn.Module):
    """In the place of a model's body: the hidden states that it is given."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor | None = None, **__: Any) -> Any:
        return _Output(inputs_embeds)

    @property
    def decoder(self) -> _Given:
        """Where some models have their body."""
        return self


class TransformersNetwork(Network):
    """All requests of a step are one row of tokens to the model: only attention knows them apart."""

    def __init__(
        self, config: ModelConfig, model: Any, layers: tuple[AttentionLayer, ...], implementation: str
    ) -> None:
        """Raises UnsupportedError for masks of attention that say more than causality and ALiBi."""
        self.config = config
        self._model = model
        self._layers = layers
        self._implementation = implementation
        self._layer_of: dict[int, AttentionLayer] = {}
        self._slopes: dict[int, torch.Tensor] = {}  # of the layers with ALiBi, over their scales
        if implementation == TORCH:
            slopes = read_slopes(model, model.device)
            self._slopes = {n: slopes[n] / layer.scale for n, layer in enumerate(layers) if slopes[n].any()}
        else:
            self._layer_of = {id(model.get_submodule(layer.name)): layer for layer in layers}
        # The model's own forward makes logits of hidden states, whatever it does there (scales, caps).
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, model.base_model_prefix: _Given()}

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self._layers

    @property
    def alibi_layers(self) -> tuple[AttentionLayer, ...]:
        """Those whose keys have elements that must not be rounded."""
        return tuple(self._layers[index] for index in self._slopes)

    @property
    def tap_points(self) -> tuple[str, ...]:
        return ()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._model.get_input_embeddings()(input_ids.long())
        return rows

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        in_order = iter(self._layers)

        def attend(
            module: torch.nn.Module | None,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            keywords: dict[str, Any],
        ) -> torch.Tensor:
            layer = next(in_order) if module is None else self._layer_of[id(module)]
            value_dim = value.shape[-1]
            if (slopes := self._slopes.get(layer.index)) is not None:
                query, key = with_alibi(query, key, inputs.positions, slopes)
            query, key, value = (pad(part, (0, layer.head_dim - part.shape[-1])) for part in (query, key, value))
            return inputs.attend(layer, query, key, value, keywords.get("s_aux"))[..., :value_dim]

        tokens: dict[str, torch.Tensor] = (
            {"input_ids": inputs.input_ids[None].long()}
            if inputs.inputs_embeds is None
            else {"inputs_embeds": inputs.inputs_embeds[None]}
        )
        output = run(self._model, tokens, inputs.positions[None], attend, self._implementation)
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
