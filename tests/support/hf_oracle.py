"""Models of Hugging Face as oracles: tiny random ones, and the logits that our workers sample from."""

import torch

from workerkit.framework import roles
from workerkit.framework.interfaces.engine import CacheIdentity, EngineRequest, MultimodalSpan
from workerkit.framework.interfaces.sampling import Sampler
from workerkit.framework.interfaces.sampling_params import SamplingParams


def random_model(name, **fields):
    """A causal language model by the name of its family, its logits wide apart and no 1-D parameter trivial."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    perturb(model)
    return model


@torch.no_grad()
def perturb(model):
    """In place: logits wide apart, no 1-D parameter trivial."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
        else:
            parameter.mul_(4)


def random_prompts(lengths, seed=1):
    """Of ids 2 to 127."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 128, (length,), generator=generator).tolist() for length in lengths]


def assert_served_as_by(model, prompts, served):
    """`served`: what `serve` returned for the prompts."""
    for prompt, (tokens, logits) in zip(prompts, served, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert tokens == expected.argmax(-1).tolist()


class Recording(Sampler):
    """Greedy, and keeps the logits of each request in order."""

    def __init__(self):
        self.rows = {}

    def process(self, logits, batch):
        if not batch.is_dummy:
            for row, (req_id, partial) in enumerate(zip(batch.req_ids, batch.plan.is_partial, strict=True)):
                if not partial:
                    self.rows.setdefault(req_id, []).append(logits[row].clone())
        return logits

    def draw(self, logits, batch):
        return logits.argmax(-1)

    def keys(self, batch):
        raise NotImplementedError("nobody speculates here")


def serve(assembly, prompts, count, loras=None, images=None):
    """[(tokens, logits [count, V])] of each prompt, all in one batch; `loras`: name of each one's adapter, or None;
    `images`: ImageInputs of each one."""
    recording = Recording()
    with assembly.with_override(roles.SAMPLER, recording) as other:
        worker = other.worker
        worker.start()
        scheduler = other.get(roles.SCHEDULER)
        tokens = {str(i): [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            lora, pictures = loras[i] if loras else None, images[i] if images else ()
            spans = [MultimodalSpan(start=p.start, length=p.num_tokens, digest=p.digest) for p in pictures]
            request = EngineRequest(
                req_id=str(i),
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(max_tokens=count),
                cache_identity=CacheIdentity(lora=lora, multimodal=tuple(spans)),
                lora=lora,
                images=tuple(pictures),
            )
            scheduler.add(request)
        while scheduler.has_work:
            output = scheduler.schedule()
            if worker.execute_model(output) is None:
                for req_id, progress in scheduler.update(output, worker.sample_tokens().get()).items():
                    tokens[req_id].extend(progress.token_ids)
    return [(tokens[req_id], torch.stack(recording.rows[req_id])) for req_id in tokens]
