"""Where a draft comes from: a checkpoint of its own, a random generator, or the target itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from attrs import validators

from workerkit.components.model.checkpoint import CheckpointNetwork, weights_with_progress
from workerkit.framework.errors import ModelError, UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.draft import DraftHead, HeadsDraft
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.model import LoadedModel, ModelConfig, ModelLibrary, ModelLoader, Network
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.interfaces.speculation import DraftModel, DraftWeights

_VOCAB_SIZES = ("draft_vocab_size", "truncated_vocab_size")  # EAGLE's name for it, and Medusa's


@attrs.frozen(kw_only=True)
class CheckpointDraftConfig:
    """Options of `draft: checkpoint`."""

    source: str | None = attrs.field(
        default=None,
        validator=validators.optional(validators.min_len(1)),
        metadata={"doc": "folder or file with the draft; null takes the target's own checkpoint (MTP)"},
    )
    architecture: str | None = attrs.field(
        default=None,
        metadata={
            "doc": "a name from the model library's architectures; null takes the one in the draft's config.json"
            " (EAGLE's first checkpoints have their target's there: EagleLlamaForCausalLM is meant)"
        },
    )
    progress: bool = attrs.field(
        default=True, metadata={"doc": "a progress bar while weights are read, where stderr is a terminal"}
    )


@attrs.frozen(kw_only=True)
class RandomDraftConfig:
    """Options of `draft: random`; what is not said here is as in the target."""

    architecture: str = attrs.field(metadata={"doc": "a name from the model library's architectures"})
    num_hidden_layers: int = attrs.field(default=1, validator=validators.ge(1), metadata={"doc": "decoder layers"})
    draft_vocab_size: int | None = attrs.field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        metadata={"doc": "tokens that it can propose, chosen at random; null proposes all of the target's"},
    )
    seed: int = attrs.field(default=0, validator=validators.ge(0), metadata={"doc": "seed of its weights"})
    fields: Mapping[str, Any] = attrs.field(
        factory=dict, metadata={"doc": "further fields, as they would stand in the architecture's config.json"}
    )


class CheckpointDraft(DraftModel):
    """Reads a draft with the target's kind of loader, and checks that it fits before and after reading its weights."""

    def __init__(
        self,
        config: CheckpointDraftConfig,
        section: ModelSection,
        context: DeviceContext,
        loader: ModelLoader,
        library: ModelLibrary,
        loaded: LoadedModel,
        attention: AttentionBackend,
        kernels: Kernels,
    ) -> None:
        self._config = config
        self._context = context
        self._loader = loader if config.source is None else loader.at(config.source)
        self._quantization = section.quantization.kept
        self._library = library
        self._loaded = loaded
        self._attention = attention
        self._kernels = kernels

    def load(self) -> DraftWeights:
        with self._naming_the_source():
            config = self._loader.read_config()
            if self._config.architecture is not None:
                config = attrs.evolve(config, architecture=self._config.architecture)
            network = self._library.build(
                for_target(config, self._loaded.config), self._context.dtype, self._context.device
            )
            network.quantize(self._quantization)
            draft = behind_target(network, self._loaded)
            self._kernels.prepare(self._context)
            self._attention.prepare(draft.attention_layers, self._context.dtype)
        self.reload_weights(draft)
        with self._naming_the_source():
            check_shared(network, self._loaded)
        return draft

    def reload_weights(self, draft: DraftWeights) -> None:
        assert draft.network is not None
        with self._naming_the_source():
            weights = weights_with_progress(self._loader, draft.network.config, "loading draft", self._config.progress)
            draft.network.load_weights(weights)

    @contextlib.contextmanager
    def _naming_the_source(self) -> Iterator[None]:
        try:
            yield
        except ModelError as error:
            source = self._config.source or "the target's checkpoint"
            raise type(error)(f"components.draft ({source}): {error}") from error


class RandomDraft(DraftModel):
    """Of the target's sizes, with random weights: for tests, and to measure what it costs."""

    def __init__(
        self,
        config: RandomDraftConfig,
        context: DeviceContext,
        library: ModelLibrary,
        loaded: LoadedModel,
        attention: AttentionBackend,
        kernels: Kernels,
    ) -> None:
        self._config = config
        self._context = context
        self._library = library
        self._loaded = loaded
        self._attention = attention
        self._kernels = kernels

    def load(self) -> DraftWeights:
        c = self._config
        if fixed := sorted(c.fields.keys() & {field.name for field in attrs.fields(ModelConfig)}):
            raise ModelError(f"components.draft.fields: {', '.join(fixed)} cannot be chosen, the target's is taken")
        sizes = {} if c.draft_vocab_size is None else dict.fromkeys(_VOCAB_SIZES, c.draft_vocab_size)
        config = attrs.evolve(
            self._loaded.config,
            architecture=c.architecture,
            num_hidden_layers=c.num_hidden_layers,
            sliding_windows=(),
            recurrent_layers=(),
            tie_word_embeddings=True,
            raw={**sizes, **c.fields},
        )
        network = self._library.build(
            for_target(config, self._loaded.config), self._context.dtype, self._context.device
        )
        if sizes and not isinstance(network, DraftHead):
            raise ModelError(f"components.draft.draft_vocab_size: {c.architecture} has no vocabulary of its own")
        draft = behind_target(network, self._loaded)
        self._kernels.prepare(self._context)
        self._attention.prepare(draft.attention_layers, self._context.dtype)
        self.reload_weights(draft)
        check_shared(network, self._loaded)
        return draft

    def reload_weights(self, draft: DraftWeights) -> None:
        network = draft.network
        if not isinstance(network, CheckpointNetwork):
            raise UnsupportedError(
                f"components.draft: the tensors of {self._config.architecture} are not known by name"
            )
        network.load_weights(_random_tensors(network, self._config.seed))


class TargetDraft(DraftModel):
    """The target proposes, too: every draft is accepted. It costs keys and values for its layers, no weights."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def load(self) -> DraftWeights:
        return behind_target(self._loaded.network, self._loaded)


def for_target(config: ModelConfig, target: ModelConfig) -> ModelConfig:
    """The draft's config with what it leaves to its target. Raises ModelError where it was made for another one."""
    given = {
        "num_target_layers": (config.raw.get("num_target_layers"), target.num_hidden_layers),
        "target_hidden_size": (config.raw.get("target_hidden_size"), target.hidden_size),
        "vocab_size": (config.vocab_size or None, target.vocab_size),
    }
    problems = [
        f"{name} is {value}, the target's is {right}"
        for name, (value, right) in given.items()
        if value not in (None, right)
    ]
    if problems:
        raise ModelError(f"{config.architecture} was made for another target: {'; '.join(problems)}")
    return attrs.evolve(
        config,
        hidden_size=config.hidden_size or target.hidden_size,
        vocab_size=target.vocab_size,
        raw={**config.raw, "num_target_layers": target.num_hidden_layers, "target_hidden_size": target.hidden_size},
    )


def behind_target(network: Network, loaded: LoadedModel) -> DraftWeights:
    """The draft with its layers behind the target's. Raises ModelError if it reads what the target does not have, and
    UnsupportedError if it has recurrent layers."""
    if network.recurrent_layers:
        raise UnsupportedError(
            f"components.draft: {network.config.architecture} has recurrent layers, whose state cannot be taken back "
            "when drafts are rejected; right: a draft without such layers, an mtp head, or speculator ngram or suffix"
        )
    if isinstance(network, DraftHead):
        known = loaded.network.tap_points[:-1]  # what leaves the last layer was never seen in training
        if unknown := [name for name in network.features if name not in known]:
            raise ModelError(
                f"{network.config.architecture} reads {', '.join(unknown)} of its target, which has {', '.join(known)}"
            )
        if not network.features and network.config.hidden_size != loaded.config.hidden_size:
            raise ModelError(
                f"{network.config.architecture}: hidden_size {network.config.hidden_size} is not the target's, "
                f"{loaded.config.hidden_size}, whose final states it reads"
            )
    first = len(loaded.network.attention_layers)
    layers = tuple(
        attrs.evolve(layer, index=first + layer.index, name=f"draft.{layer.name}", is_draft=True)
        for layer in network.attention_layers
    )
    return DraftWeights(network=network, attention_layers=layers)


def check_shared(network: Network, loaded: LoadedModel) -> None:
    """Raise ModelError where a filled draft has to share with the target what does not fit it."""
    if not isinstance(network, DraftHead) or isinstance(network, HeadsDraft):
        return
    hidden, right = network.config.hidden_size, loaded.config.hidden_size
    missing = [name for name, own in (("embeddings", network.has_embeddings), ("head", network.has_head)) if not own]
    if missing and hidden != right:
        raise ModelError(
            f"{network.config.architecture} has no {' and no '.join(missing)} of its own, and the target's are {right} "
            f"wide, not {hidden}"
        )


def _random_tensors(network: CheckpointNetwork, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, target in network.required_tensors().items():
        if not target.is_floating_point:  # ids of a draft vocabulary, or their distances from the draft's own
            ids = torch.randperm(network.config.vocab_size, generator=generator)[: target.shape[0]].sort().values
            yield name, ids - torch.arange(len(ids)) if name.endswith("d2t") else ids
            continue
        tensor = torch.randn(target.shape, generator=generator)
        if len(target.shape) == 1:
            yield name, 0.2 * tensor + (0.0 if name.endswith("bias") else 1.0)
        else:
            gain = 4.0 if name.endswith(("embed_tokens.weight", "lm_head.weight")) else 1.0  # the spread of the logits
            yield name, gain * tensor * target.shape[-1] ** -0.5
