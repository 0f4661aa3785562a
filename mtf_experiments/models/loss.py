"""Losses of next-token logits: 0 on padding, whose id is 0."""

from __future__ import annotations

from collections.abc import Sequence

from mtf_experiments import mtf
from mtf_experiments.mtf import NamedTensor


def token_nll(logits: NamedTensor, targets: NamedTensor) -> NamedTensor:
    """Negative log-likelihood of each real target in nats. f32 `[batch, length]`"""
    return _real(mtf.softmax_cross_entropy(logits, targets, "vocab"), targets)


def token_losses(logits: NamedTensor, targets: NamedTensor, label_smoothing: float) -> tuple[NamedTensor, NamedTensor]:
    """The loss that is minimised, with label smoothing, and `token_nll`. Both f32 `[batch, length]`"""
    if not label_smoothing:
        nll = token_nll(logits, targets)
        return nll, nll
    nll, uniform = mtf.softmax_cross_entropy_and_uniform(logits, targets, "vocab")
    return _real(mtf.smoothed(nll, uniform, label_smoothing), targets), _real(nll, targets)


def scaled_token_nll(logits: NamedTensor, targets: NamedTensor, scales: Sequence[float]) -> NamedTensor:
    """`token_nll` with the logits multiplied by each of `scales`. f32 `[scales, batch, length]`"""
    return mtf.stack([token_nll(logits * scale, targets) for scale in scales], "scales")


def _real(nll: NamedTensor, targets: NamedTensor) -> NamedTensor:
    return mtf.where(mtf.not_equal(targets, 0), nll, 0.0)
