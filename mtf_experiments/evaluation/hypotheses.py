"""What searches have in common: which next tokens are possible, and what they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mtf_experiments import mtf
from mtf_experiments.data.tokenizer import EOS, PAD
from mtf_experiments.mtf import NamedTensor

NOTHING = -1e30
"""Log-probability of what cannot be: finite, so that sums and differences of it stay numbers."""


class Hypotheses(NamedTuple):
    """The result of a search: for each sentence the best hypotheses, best first.

    `tokens: [batch, n_best, steps]` with EOS where there is one, then 0; `lengths: [batch, n_best]` in tokens, EOS
    included; `finished`: whether it ends in EOS; `log_probs`: natural logarithm of the model's probability of the tokens;
    `scores`: what the hypotheses are ranked by. Fewer hypotheses than asked for exist where `scores` < NOTHING / 2.
    """

    tokens: NamedTensor
    lengths: NamedTensor
    finished: NamedTensor
    log_probs: NamedTensor
    scores: NamedTensor


@dataclass(frozen=True)
class Constraints:
    """What may be generated: no padding, no id from `vocab_size` on, no EOS among the first `min_length` - 1 tokens.

    `max_lengths: [batch]`, at most `steps`, are the most tokens of each sentence, EOS included; `min_length` is one for all
    or `[batch]`. `prefix: [batch, steps]` (0 where nothing is prescribed) are tokens that each hypothesis begins with.
    """

    max_lengths: NamedTensor
    vocab_size: int
    min_length: int | NamedTensor = 1
    prefix: NamedTensor | None = None

    def possible(self, log_probs: NamedTensor, position: NamedTensor) -> NamedTensor:
        """`log_probs` `[batch, beam, vocab]` of the tokens at `position` (a scalar), NOTHING for those not possible."""
        ids = mtf.arange(log_probs.shape.find("vocab"))
        impossible = mtf.equal(ids, PAD) | mtf.greater_equal(ids, self.vocab_size)
        early = mtf.less(position, self.min_length - 1)
        early = mtf.logical_and(early, mtf.equal(ids, EOS), output_shape=[*early.shape, *ids.shape])
        impossible = early | impossible
        if self.prefix is None:
            return mtf.where(impossible, NOTHING, log_probs, output_shape=log_probs.shape)
        wanted = mtf.index(self.prefix, "steps", position.array)
        shape = [*wanted.shape, *ids.shape]
        prescribed = mtf.greater(wanted, PAD)
        other = mtf.not_equal(ids, wanted, output_shape=shape)
        impossible = mtf.where(prescribed, other, impossible, output_shape=shape)
        return mtf.where(impossible, NOTHING, log_probs, output_shape=log_probs.shape)


def write(tokens: NamedTensor, token: NamedTensor, position: NamedTensor) -> NamedTensor:
    """`tokens` `[..., steps]` with `token` `[...]` at `position`."""
    here = mtf.equal(mtf.arange(tokens.shape.find("steps")), position)
    return mtf.where(here, token, tokens, output_shape=tokens.shape)
