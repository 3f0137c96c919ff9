"""Log-probabilities on their way to the user: from a step's arrays to one value a token, and a prompt's over chunks."""

from __future__ import annotations

import attrs

from workerkit.framework.errors import IntegrityError
from workerkit.framework.interfaces.engine import PromptLogprobs, TokenLogprobs
from workerkit.framework.interfaces.request import Logprobs


def token_logprobs(step: Logprobs | None, count: int) -> tuple[TokenLogprobs, ...]:
    """The first `count` positions: those of tokens that count. Raises IntegrityError when there are fewer."""
    available = 0 if step is None else len(step.ranks)
    if available < count:
        raise IntegrityError(f"the worker sent logprobs of {available} tokens, {count} are needed")
    if step is None:
        return ()
    first_chosen = 1 + step.num_top
    return tuple(
        TokenLogprobs(
            token_id=ids[0],
            logprob=values[0],
            rank=rank,
            top=tuple(zip(ids[1:first_chosen], values[1:first_chosen], strict=True)),
            chosen=tuple(zip(ids[first_chosen:], values[first_chosen:], strict=True)),
        )
        for ids, values, rank in zip(
            step.token_ids[:count].tolist(), step.logprobs[:count].tolist(), step.ranks[:count].tolist(), strict=True
        )
    )


@attrs.define(eq=False)
class PromptPieces:
    """A prompt's log-probabilities, a piece for each chunk, in order. One that is computed anew needs new ones."""

    prompt_len: int
    pieces: list[Logprobs] = attrs.field(factory=list)

    def add(self, piece: Logprobs) -> None:
        """Those of the next prompt tokens."""
        self.pieces.append(piece)

    def whole(self) -> PromptLogprobs:
        """Raises IntegrityError when the pieces are not those of the whole prompt."""
        after_the_first = [entry for piece in self.pieces for entry in token_logprobs(piece, len(piece.ranks))]
        if len(after_the_first) != self.prompt_len - 1:
            raise IntegrityError(
                f"the worker sent prompt logprobs of {len(after_the_first)} tokens, {self.prompt_len - 1} are needed"
            )
        return (None, *after_the_first)
