"""Perplexity, with every count that it was divided by: a number without its unit cannot be compared with a paper.

Sums of negative log likelihoods (nats) are kept per logit scale in float64, counts as integers; nothing is averaged
over batches, so that batching, order and sharding do not change the result.  Definitions (n = total NLL of the scored
tokens):

    nats/token = n / tokens             ppl/token = exp(n / tokens)
    ppl/word   = exp(n / (words + sentences))
    bits/char  = n / ln 2 / (characters + sentences)      each sentence ends in one newline character

The end of each sentence is a scored token (hence `+ sentences`); with `include_eos=False` it leaves the numerator and
the denominator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mtf_experiments.errors import NonFiniteError, UserError

PAD_ID, EOS_ID = 0, 1
_LEAST_FOR_INTERVAL = 10
NO_OOV_RULE = "none: every word is scored as its sentence pieces"

# Texts that are known by name in papers: the label is only given to a result with exactly these sentences and words.
# LM1B per-word: news.en.heldout-00000-of-00050, the development set of Shazeer et al. 2018.
PINNED_COUNTS = {"LM1B per-word": (6_075, 153_583)}


@dataclass(frozen=True)
class TextCounts:
    """What the scored text consists of, counted on the text itself and not on the batches.

    Attributes:
      sentences: lines, blank ones included; each is one end-of-sentence token.
      words: words between blanks, without the ends of sentences.
      characters: Unicode characters, without newlines.
      unknown: unknown tokens among the scored ones.
      truncated: tokens of the text that were cut off and not scored.
      files: the files that the text was read from.
      sha256: checksum of the text.
      oov_rule: what was done to words outside a word list before tokenisation.
    """

    sentences: int
    words: int
    characters: int
    unknown: int = 0
    truncated: int = 0
    files: tuple[str, ...] = ()
    sha256: str = ""
    oov_rule: str = NO_OOV_RULE


@dataclass(frozen=True)
class ScaleResult:
    """The scores at one logit scale; a perplexity too large for a float is inf, its NLL beside it is not.

    `ppl_word_low` and `ppl_word_high` bound the 95 % interval of ppl/word for other text of the same kind: sentences are
    taken as drawn independently, and the standard error of the mean NLL is that of a ratio estimator over them. None where
    it is not known which token is of which sentence, or there are fewer than ten.
    """

    logit_scale: float
    total_nll: float
    nll_per_token: float
    ppl_token: float
    ppl_word: float
    bits_per_char: float
    ppl_word_low: float | None = None
    ppl_word_high: float | None = None


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexities of one text at every logit scale, with counts and definitions.

    Attributes:
      split: which part of the data this is ("validation", "test", ...).
      scales: one ScaleResult per logit scale, in the order asked for.
      tokens: scored tokens (the denominator of nats/token).
      per_word: the denominator of ppl/word.
      per_char: the denominator of bits/char.
      counts: what the text consists of.
      include_eos: whether ends of sentences are scored and counted.
      token_checksum: depends on which tokens were scored how often, not on their batches or order.
      total_sentences: sentences of the whole text; more than `counts.sentences` makes the result partial.
      label: the name under which papers know this score, "" if none was claimed.
    """

    split: str
    scales: tuple[ScaleResult, ...]
    tokens: int
    per_word: int
    per_char: int
    counts: TextCounts
    include_eos: bool
    token_checksum: str
    total_sentences: int
    label: str = ""

    @property
    def partial(self) -> str:
        """`"PARTIAL k/N"` if only k of N sentences were scored, else ""."""
        k, n = self.counts.sentences, self.total_sentences
        return f"PARTIAL {k}/{n}" if k < n else ""

    def at(self, logit_scale: float) -> ScaleResult:
        """Return the scores at one of the logit scales; KeyError if it was not asked for."""
        for scale in self.scales:
            if scale.logit_scale == logit_scale:
                return scale
        raise KeyError(f"no result for logit scale {logit_scale}, only for {[s.logit_scale for s in self.scales]}")

    def definitions(self) -> dict[str, str]:
        """Return what is scored and what each number is divided by, in words."""
        ends = " + sentences" if self.include_eos else ""
        return {
            "eos": "scored and counted" if self.include_eos else "neither scored nor counted",
            "bos": "neither scored nor counted",
            "unk": "scored and counted",
            "oov": self.counts.oov_rule,
            "nats/token": f"total NLL / tokens ({self.tokens})",
            "ppl/token": f"exp(total NLL / tokens ({self.tokens}))",
            "ppl/word": f"exp(total NLL / (words{ends} = {self.per_word}))",
            "bits/char": f"total NLL / ln 2 / (characters{ends} = {self.per_char})",
        }

    def metrics(self) -> dict[str, float]:
        """Return metric names and values; a partial or EOS-free result has other names than a whole one."""
        suffix = ("" if self.include_eos else "_without_eos") + ("_partial" if self.partial else "")
        found = {}
        for s in self.scales:
            scale = "" if s.logit_scale == 1.0 else f"_logits_x{s.logit_scale:g}"
            for name in ("nll_per_token", "ppl_token", "ppl_word", "bits_per_char"):
                found[f"{self.split}/{name}{scale}{suffix}"] = getattr(s, name)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values; an infinite number is the text "inf", for JSON has none."""
        counts = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self.counts).items()}
        scales = [
            {k: str(v) if v is not None and math.isinf(v) else v for k, v in vars(scale).items()}
            for scale in self.scales
        ]
        return {
            "split": self.split,
            "label": self.label,
            "partial": self.partial,
            "scales": scales,
            "tokens": self.tokens,
            "per_word": self.per_word,
            "per_char": self.per_char,
            "include_eos": self.include_eos,
            "total_sentences": self.total_sentences,
            "token_checksum": self.token_checksum,
            "counts": counts,
            "definitions": self.definitions(),
            "metrics": {name: str(value) if math.isinf(value) else value for name, value in self.metrics().items()},
        }

    def lines(self) -> list[str]:
        """Return the result for the console."""
        c, title = self.counts, " ".join(filter(None, [self.split, self.label and f"({self.label})", self.partial]))
        eos = "eos scored" if self.include_eos else "eos not scored"
        lines = [
            f"{title}: {c.sentences:,} sentences, {c.words:,} words, {c.characters:,} characters, "
            f"{self.tokens:,} tokens ({c.unknown:,} unknown, {c.truncated:,} truncated), "
            f"checksum {self.token_checksum}",
            f"  {eos}, bos not scored, unk scored, oov {c.oov_rule}; "
            f"divided by {self.tokens:,} tokens, {self.per_word:,} words, {self.per_char:,} characters",
        ]
        for s in self.scales:
            interval = "" if s.ppl_word_low is None else f" ({s.ppl_word_low:.4f} to {s.ppl_word_high:.4f})"
            lines.append(
                f"  logits x {s.logit_scale:g}: ppl/word {s.ppl_word:.4f}{interval}, ppl/token {s.ppl_token:.4f}, "
                f"nats/token {s.nll_per_token:.6f}, bits/char {s.bits_per_char:.6f}, total {s.total_nll:.4f} nats"
            )
        return lines


class PerplexityAccumulator:
    """Sums token NLLs of any number of batches, in any order; sums of shards can be merged.

    Args:
      logit_scales: the factors on the logits that the NLLs were computed with; must contain 1.0.
    """

    def __init__(self, logit_scales: Sequence[float] = (1.0,)) -> None:
        if 1.0 not in logit_scales or len(set(logit_scales)) != len(logit_scales):
            raise UserError(f"logit scales must differ and contain 1.0, for comparison; got {list(logit_scales)}")
        self.logit_scales = tuple(logit_scales)
        self.inner_total = np.zeros(len(logit_scales))
        self.eos_total = np.zeros(len(logit_scales))
        self.tokens = 0
        self.sentences = 0
        self._checksum = 0
        # Over sentences, for each scale: sums of n^2 and n t, where n is a sentence's NLL and t its tokens; and of t^2.
        self._squares = np.zeros((2, len(logit_scales)))
        self._tokens_squared = 0.0
        self._told_apart = 0

    def add(self, nll: np.ndarray, targets: np.ndarray, segments: np.ndarray | None = None) -> None:
        """Add one batch.

        Args:
          nll: nats, `[scales, batch, length]`; values at padding are ignored, whatever they are.
          targets: token ids `[batch, length]`, 0 is padding, 1 ends a sentence.
          segments: `[batch, length]`, 0 on padding; must agree with `targets` about it.

        Raises:
          ValueError: the shapes or the two kinds of padding disagree.
          NonFiniteError: the NLL of a real token is NaN.
        """
        nll, targets = np.asarray(nll), np.asarray(targets)
        if nll.shape != (len(self.logit_scales), *targets.shape):
            raise ValueError(f"nll has shape {nll.shape}, wanted {(len(self.logit_scales), *targets.shape)}")
        real = targets != PAD_ID
        if segments is not None and not np.array_equal(real, np.asarray(segments) != 0):
            raise ValueError("targets and segments disagree about which positions are padding")
        scored, ids = nll[:, real].astype(np.float64), targets[real]
        if np.isnan(scored).any():
            raise NonFiniteError(f"the NLL of {int(np.isnan(scored).sum())} token(s) is NaN")
        self.inner_total += scored[:, ids != EOS_ID].sum(axis=1)
        self.eos_total += scored[:, ids == EOS_ID].sum(axis=1)
        self.tokens += ids.size
        self.sentences += int((ids == EOS_ID).sum())
        self._checksum = (self._checksum + int(_scrambled(ids).sum(dtype=np.uint64))) % 2**64
        if segments is not None:
            self._add_sentences(scored, np.asarray(segments), real)

    def _add_sentences(self, scored: np.ndarray, segments: np.ndarray, real: np.ndarray) -> None:
        rows = np.broadcast_to(np.arange(len(segments))[:, None], segments.shape)
        _, sentence = np.unique(np.stack([rows[real], segments[real]]), axis=1, return_inverse=True)
        sentence = sentence.reshape(-1)
        tokens = np.bincount(sentence).astype(np.float64)
        for i, nll in enumerate(scored):
            total = np.bincount(sentence, weights=nll)
            self._squares[:, i] += (total @ total, total @ tokens)
        self._tokens_squared += float(tokens @ tokens)
        self._told_apart += len(tokens)

    def _standard_errors(self) -> np.ndarray | None:
        """Of nats/token at each scale, or None where sentences were not told apart or are too few."""
        if self._told_apart < max(_LEAST_FOR_INTERVAL, self.sentences):
            return None
        mean = (self.inner_total + self.eos_total) / self.tokens
        if not np.isfinite(mean).all():
            return None
        squares, mixed = self._squares
        residuals = np.maximum(squares - 2 * mean * mixed + mean**2 * self._tokens_squared, 0.0)
        return np.sqrt(residuals * self._told_apart / (self._told_apart - 1)) / self.tokens

    def merge(self, other: "PerplexityAccumulator") -> None:
        """Add the sums of another accumulator, of another process for instance; ValueError if its scales differ."""
        if other.logit_scales != self.logit_scales:
            raise ValueError(f"cannot merge logit scales {other.logit_scales} into {self.logit_scales}")
        self.inner_total = self.inner_total + other.inner_total
        self.eos_total = self.eos_total + other.eos_total
        self.tokens += other.tokens
        self.sentences += other.sentences
        self._checksum = (self._checksum + other._checksum) % 2**64
        self._squares = self._squares + other._squares
        self._tokens_squared += other._tokens_squared
        self._told_apart += other._told_apart

    def result(
        self,
        counts: TextCounts,
        split: str = "validation",
        *,
        include_eos: bool = True,
        total_sentences: int | None = None,
        label: str = "",
    ) -> PerplexityResult:
        """Return the perplexities of what was added.

        Args:
          counts: of the text that was scored; of the scored part if the evaluation was capped.
          split: which part of the data this is.
          include_eos: False takes ends of sentences out of numerators and denominators.
          total_sentences: sentences of the whole text, by default those of `counts`; more make the result partial.
          label: a name of `PINNED_COUNTS` to claim for the result.

        Raises:
          UserError: nothing to score, or the text is not the one that `label` stands for.
          ValueError: other sentences were scored than `counts` says.
        """
        if self.tokens == 0:
            raise UserError(f"the {split} set has no tokens to score; is its file empty?")
        if self.sentences != counts.sentences:
            raise ValueError(f"{self.sentences} sentences were scored, but the text has {counts.sentences}")
        ends = self.sentences if include_eos else 0
        tokens = self.tokens - (0 if include_eos else self.sentences)
        per_word, per_char = counts.words + ends, counts.characters + ends
        if min(tokens, per_word, per_char) == 0:
            raise UserError(f"the {split} set has nothing but ends of sentences, which include_eos=False leaves out")
        totals = self.inner_total + self.eos_total if include_eos else self.inner_total
        errors = self._standard_errors() if include_eos else None
        half_widths = [None] * len(totals) if errors is None else (1.96 * errors * tokens / per_word).tolist()
        result = PerplexityResult(
            split=split,
            scales=tuple(
                ScaleResult(
                    logit_scale=scale,
                    total_nll=float(total),
                    nll_per_token=float(total) / tokens,
                    ppl_token=_exp(float(total) / tokens),
                    ppl_word=_exp(float(total) / per_word),
                    bits_per_char=float(total) / math.log(2) / per_char,
                    ppl_word_low=None if half is None else _exp(float(total) / per_word - half),
                    ppl_word_high=None if half is None else _exp(float(total) / per_word + half),
                )
                for scale, total, half in zip(self.logit_scales, totals, half_widths, strict=True)
            ),
            tokens=tokens,
            per_word=per_word,
            per_char=per_char,
            counts=counts,
            include_eos=include_eos,
            token_checksum=f"{self._checksum:016x}",
            total_sentences=counts.sentences if total_sentences is None else total_sentences,
        )
        return replace(result, label=_checked_label(label, result)) if label else result


@dataclass(frozen=True)
class ScaleChoice:
    """The logit scale that is best on the development set, and both of its results there."""

    logit_scale: float
    development: ScaleResult
    development_at_one: ScaleResult


def choose_scale(development: PerplexityResult) -> ScaleChoice:
    """Return the logit scale of the lowest NLL on the development set, the one nearest to 1.0 if several are equal.

    Raises:
      UserError: `development` is a test set, on which nothing may be chosen.
    """
    if "test" in development.split.lower():
        raise UserError(f"a logit scale must be chosen on development data, not on the {development.split} set")
    best = min(development.scales, key=lambda s: (s.total_nll, abs(s.logit_scale - 1.0)))
    return ScaleChoice(best.logit_scale, best, development.at(1.0))


def _checked_label(label: str, result: PerplexityResult) -> str:
    if label not in PINNED_COUNTS:
        raise UserError(f"unknown label {label!r}, known are {', '.join(PINNED_COUNTS)}")
    found, (sentences, words) = (result.counts.sentences, result.counts.words), PINNED_COUNTS[label]
    if found != (sentences, words) or result.partial or not result.include_eos:
        raise UserError(
            f"the label {label!r} stands for the whole text of {sentences:,} sentences and {words:,} words with their "
            f"ends scored; this result has {found[0]:,} sentences and {found[1]:,} words"
            f"{'' if result.include_eos else ', ends not scored'}{result.partial and ', ' + result.partial}"
        )
    return label


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _scrambled(ids: np.ndarray) -> np.ndarray:
    """Map ids to 64-bit words whose sum is telling (the finaliser of SplitMix64)."""
    z = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
